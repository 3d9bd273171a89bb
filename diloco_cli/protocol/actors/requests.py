"""Operators' requests: written into the bucket by their commands, answered by the syncer with commits.

They have numbers without gaps. What is not signed by an operator (in an unsigned run: whose checksum is wrong) is no
request: readers pass a few such objects by, and who asks takes the number behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, takewhile

from diloco_cli.protocol.log.claims import STRANGERS_PASSED, OccupiedError
from diloco_cli.protocol.log.keys import request_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import Request, RequestKind, RunFormat
from diloco_cli.protocol.log.signed import LOOKS, create_signed, read_signed
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.states import RunPhase
from diloco_cli.protocol.log.wire import RecordError, decode, encode
from diloco_cli.signing import OPERATOR, UNSIGNED, Unsigned

MAX_REASON = 500  # characters of a request's text in the log


@dataclass(frozen=True)
class Pending:
    """Requests that one commit answers: `newest`, the last number; `stop`, the reason of a stop if they amount to one;
    `alone`, the request itself if it gets an answer of its own; else `refused`, why they are refused."""

    newest: int
    stop: str | None
    refused: str
    alone: Request | None = None


@dataclass(frozen=True)
class _Asked:
    """The request under one number, or the reason why its bytes are none."""

    number: int
    request: Request | None
    refused: str = ""

    def is_a(self, *kinds: RequestKind) -> bool:
        return self.request is not None and self.request.kind in kinds

    @property
    def is_alone(self) -> bool:
        return self.request is not None and not self.is_a("stop", "resume")


def pending_requests(run: RunFormat, state: RunState) -> Steps[Pending | None]:
    """The requests to answer next: one that gets an answer of its own, or all those up to the next such one. A stop
    settles all requests that are there, also those after it: none of them may act when the run is resumed.

    A later `resume` withdraws a stop, with any requests between them."""
    first = yield from _asked(run, state, state.next_request)
    if first is None:
        return None
    if first.is_alone:
        return Pending(first.number, None, "", first.request)
    asked = yield from _all_asked(run, state, [first])
    together = list(takewhile(lambda one: not one.is_alone, asked))
    stop, last = _stop_that_holds(asked), together[-1]
    if stop is not None and stop.number <= last.number:
        assert stop.request is not None
        return Pending(asked[-1].number, (stop.request.reason or "by request")[:MAX_REASON], "")
    return Pending(last.number, None, last.refused or "an older stop was withdrawn")


def newest_request(run: RunFormat, state: RunState) -> Steps[int | None]:
    """The number of the last request without an answer; None if there is none."""
    asked = yield from _all_asked(run, state, [])
    return asked[-1].number if asked else None


def _stop_that_holds(asked: list[_Asked]) -> _Asked | None:
    """The first stop after the last resume."""
    resumed = max((one.number for one in asked if one.is_a("resume")), default=-1)
    return next((one for one in asked if one.is_a("stop") and one.number > resumed), None)


def _all_asked(run: RunFormat, state: RunState, known: list[_Asked]) -> Steps[list[_Asked]]:
    """The requests without an answer; `known` ones are not read again, as a second read might differ."""
    found = list(known)
    while (one := (yield from _asked(run, state, found[-1].number + 1 if found else state.next_request))) is not None:
        found.append(one)
    return found


def _asked(run: RunFormat, state: RunState, first: int) -> Steps[_Asked | None]:
    """The next request from number `first` on, past at most STRANGERS_PASSED objects that are none."""
    keyring = run.keyring.without(state.revoked)
    for number in range(first, first + STRANGERS_PASSED):
        key = request_key(number)
        for _ in range(LOOKS):
            data = yield from read_signed(keyring, OPERATOR, key)
            if data is None:
                return None
            if not keyring.authenticates(OPERATOR, key, data):
                break
            asked = _read(number, key, data)
            if asked.request is not None:
                return asked
        else:
            return asked
    return None


def _read(number: int, key: str, data: bytes) -> _Asked:
    try:
        return _Asked(number, decode(Request, data, key))
    except RecordError as error:
        return _Asked(number, None, f"request {number}: {error}"[:MAX_REASON])


def ask(
    state: RunState, kind: RequestKind, nonce: str, time: str, reason: str = "", *,
    learner: str | None = None, to: int | None = None, revoke: str | None = None, keyring: Unsigned = UNSIGNED,
) -> Steps[int]:  # fmt: skip
    """Write a request under the next free number, which is returned."""
    strangers = 0
    for number in count(state.next_request):
        key, request = request_key(number), Request(number, kind, nonce, time, reason, learner, to, revoke)
        mine = keyring.sign(OPERATOR, key, encode(request))
        there = yield from create_signed(keyring, OPERATOR, key, mine)
        if there == mine:
            return number
        strangers = 0 if keyring.authenticates(OPERATOR, key, there) else strangers + 1
        if strangers == STRANGERS_PASSED:
            break
    hint = "delete them; a bucket policy keeps others from writing there: diloco bucket-policy --help"
    raise OccupiedError(
        f"{strangers} objects that no operator has written lie at this key and before it", where=key, hint=hint
    )


def withdraw_stop(run: RunFormat, state: RunState, nonce: str, time: str) -> Steps[bool]:
    """Before a run goes on: withdraw its stop, carried out or not. True if there was one that nobody had withdrawn."""
    asked = yield from _all_asked(run, state, [])
    stopped = state.phase == RunPhase.STOPPED and not any(one.is_a("resume") for one in asked)
    if not stopped and _stop_that_holds(asked) is None:
        return False
    yield from ask(state, "resume", nonce, time, "diloco resume", keyring=run.keyring)
    return True


def is_at_rest(run: RunFormat, state: RunState) -> Steps[bool]:
    """Whether the run is stopped, and no `diloco resume` has asked since that it goes on. Then no process may serve it,
    for whatever reason that process was started."""
    if state.phase != RunPhase.STOPPED:
        return False
    asked = yield from _all_asked(run, state, [])
    return not any(one.is_a("resume") for one in asked) or _stop_that_holds(asked) is not None
