"""Requests: written into the bucket by operators and joining islands, answered by the syncer with commits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from diloco_cli.protocol.log.commit_log import LOOKS, create_signed
from diloco_cli.protocol.log.keys import request_key
from diloco_cli.protocol.log.operations import Get, Steps
from diloco_cli.protocol.log.records import Island, Request, RequestKind, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.states import RunPhase
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, RecordError, decode, encode
from diloco_cli.signing import LOG, OPERATOR, UNSIGNED, Unsigned, learner_signer

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
    """The requests to answer next: one that gets an answer of its own, or all those up to the next such one.

    A later `resume` withdraws a stop, with any requests between them. Bytes that are no request, or not signed as a
    request of that kind must be, are ignored."""
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
        return Pending(last.number, (stop.request.reason or "by request")[:MAX_REASON], "")
    return Pending(last.number, None, last.refused or "an older stop was withdrawn")


def _stop_that_holds(asked: list[_Asked]) -> _Asked | None:
    """The first stop after the last resume."""
    resumed = max((one.number for one in asked if one.is_a("resume")), default=-1)
    return next((one for one in asked if one.is_a("stop") and one.number > resumed), None)


def _all_asked(run: RunFormat, state: RunState, known: list[_Asked]) -> Steps[list[_Asked]]:
    """The requests without an answer; `known` ones are not read again, as a second read might differ."""
    found = list(known)
    while (one := (yield from _asked(run, state, state.next_request + len(found)))) is not None:
        found.append(one)
    return found


def _asked(run: RunFormat, state: RunState, number: int) -> Steps[_Asked | None]:
    key = request_key(number)
    for _ in range(LOOKS):
        data = yield Get(key, MAX_RECORD_BYTES)
        if data is None:
            return None
        asked = _read(run, state, number, key, data)
        if asked.request is not None:
            break
    return asked


def _read(run: RunFormat, state: RunState, number: int, key: str, data: bytes) -> _Asked:
    try:
        request = decode(Request, data, key)
        if not is_signed_request(run.keyring.without(state.revoked), request, key, data):
            raise RecordError(f"it {run.keyring.wrong}")
    except RecordError as error:
        return _Asked(number, None, f"request {number}: {error}"[:MAX_REASON])
    return _Asked(number, request)


def signers_of(kind: RequestKind, island: Island | None) -> tuple[str, ...]:
    """Who may sign a request: for `join` the island's learner, or the syncer that carries it from another bucket; else
    the operator."""
    return (learner_signer(island.name), LOG) if kind == "join" and island is not None else (OPERATOR,)


def is_signed_request(keyring: Unsigned, request: Request, key: str, data: bytes) -> bool:
    return any(keyring.authenticates(signer, key, data) for signer in signers_of(request.kind, request.island))


def ask(
    state: RunState, kind: RequestKind, nonce: str, time: str, reason: str = "", *,
    island: Island | None = None, learner: str | None = None, to: int | None = None, revoke: str | None = None,
    keyring: Unsigned = UNSIGNED,
) -> Steps[int]:  # fmt: skip
    """Write a request under the next free number, which is returned."""
    number = state.next_request
    while True:
        key, request = request_key(number), Request(number, kind, nonce, time, reason, island, learner, to, revoke)
        signers = signers_of(kind, island)
        signer = next((signer for signer in signers if keyring.holds(signer)), signers[0])
        mine = keyring.sign(signer, key, encode(request))
        if (yield from create_signed(keyring, signer, key, mine)) == mine:
            return number
        number += 1


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
