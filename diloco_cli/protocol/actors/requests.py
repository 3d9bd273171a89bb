"""Operators' requests: written into the bucket by their commands, answered by a commit that names the request.

Requests have numbers without gaps. What is not signed by an operator (in an unsigned run: whose checksum is wrong) is
no request: readers skip a few such objects, and the next request takes the number behind them. The process that serves
the log answers: the syncer, or, while no syncer is alive, the operator's own command, which claims an epoch for that,
commits and leaves.

A rollback brings the parameters back to those after an earlier commit. It takes nothing out of the log: every
fragment's state and weights as of that commit are published again, as a version whose number is that of the `rollback`
commit; then the commit is appended. From there on

    offers       whose base is older are refused (`before_rollback`): re-anchored, they would bring back undone merges
    learners     replace all their parameters at once, count from 0, and take their moments from before, or new ones
    tokens       those merged after the target no longer count, neither for the run's end nor for the learning rate
    data         is not read again: each learner's data position goes on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, takewhile

from msgspec import structs

from diloco_cli.errors import DataCheckError, NotFoundError
from diloco_cli.protocol.actors.collection import Collector, collected, floor_by_request
from diloco_cli.protocol.actors.merging import write_surely
from diloco_cli.protocol.log.claims import STRANGERS_PASSED, OccupiedError, claim_epoch
from diloco_cli.protocol.log.commit_log import Pulse, append, no_pulse, state_after
from diloco_cli.protocol.log.commits import Commit, EpochStart, Quarantine, Readmit, Refuse, Revoke, Rollback, Stop
from diloco_cli.protocol.log.keys import max_fragment_bytes, request_key, state_key, weights_key
from diloco_cli.protocol.log.mending import whole_log
from diloco_cli.protocol.log.operations import List, Now, Sleep, Steps
from diloco_cli.protocol.log.records import (
    LOOKS,
    FragmentVersion,
    ProcessClaim,
    RecordError,
    Request,
    RequestKind,
    RunFormat,
    create_signed,
    decode,
    encode,
    get_named,
    read_signed,
)
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.protocol.rules.merging import why_not_quarantined
from diloco_cli.signing import OPERATOR, UNSIGNED, Authenticator, is_public_key


def back_to(
    then: RunState, outputs: tuple[FragmentVersion, ...], reason: str, evaluated: int | None = None
) -> Rollback:
    """The rollback to the commit of `then`, which may be the newest one; `outputs`: its versions, published anew."""
    known = sorted(then.learners.items())
    shares = tuple((name, one.token_parameters) for name, one in known if one.token_parameters)
    return Rollback(to=then.n, outputs=outputs, shares=shares, reason=reason, evaluated=evaluated)


def return_to(run: RunFormat, state: RunState, to: int | None, pulse: Pulse = no_pulse) -> Steps[RunState | str]:
    """The state after commit `to`, to which this head can go back; or the reason why it cannot."""
    if to is None or not state.gc_floor <= to < state.n:
        return f"only commits {state.gc_floor} to {state.n - 1} can be gone back to, not {to}"
    try:
        then = yield from state_after(run, to, state.revoked, pulse)
    except (NotFoundError, DataCheckError) as error:  # which a syncer must outlive
        return str(error)
    changed = [o.fragment for o, c in zip(then.outputs, state.outputs, strict=True) if o.state_digest != c.state_digest]
    if not changed:
        return f"every fragment is what it was after commit {to}"
    return then


def missing_objects(outputs: tuple[FragmentVersion, ...]) -> Steps[list[str]]:
    """Keys of these versions that a listing does not show: for people, before they decide."""
    missing = []
    for output in outputs:
        for key in keys_of(output):
            found: list[str] = yield List(key, limit=1)
            missing += [] if found else [key]
    return missing


def published_anew(
    run: RunFormat, outputs: tuple[FragmentVersion, ...], version: int, slot: int, epoch: int, pulse: Pulse
) -> Steps[tuple[FragmentVersion, ...] | str]:
    """Publish the same bytes as versions with number `version`, which age as if merged in `slot`; or say what cannot be
    read. `pulse` runs before each fragment: models are large, and a silent syncer would be taken for dead."""
    published = []
    for output in outputs:
        yield from pulse()
        anew = replace(output, version=version, slot=slot, epoch=epoch)
        named = (output.state_digest, output.weights_digest)
        for old_key, new_key, expected in zip(keys_of(output), keys_of(anew), named, strict=True):
            data = yield from get_named(old_key, expected, max_fragment_bytes(run.layout, output.fragment))
            if isinstance(data, str):
                return f"{old_key} {data}"
            yield from write_surely(new_key, data)
        published.append(anew)
    return tuple(published)


def keys_of(output: FragmentVersion) -> tuple[str, str]:
    """The keys of its state and of its weights."""
    names = (output.fragment, output.version, output.epoch)
    return state_key(*names, output.state_digest), weights_key(*names, output.weights_digest)


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
    state: RunState,
    kind: RequestKind,
    nonce: str,
    time: str,
    reason: str = "",
    *,
    learner: str | None = None,
    to: int | None = None,
    revoke: str | None = None,
    keyring: Authenticator = UNSIGNED,
) -> Steps[int]:
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


def stop_stands(run: RunFormat, state: RunState) -> Steps[bool]:
    """Whether the run is at rest, or will be as soon as a process serves it."""
    asked = yield from _all_asked(run, state, [])
    if _stop_that_holds(asked) is not None:
        return True
    return state.phase == RunPhase.STOPPED and not any(one.is_a("resume") for one in asked)


MAX_KEY = 64  # characters shown of what is no key


def answer_to(run: RunFormat, state: RunState, epoch: int, pending: Pending, pulse: Pulse) -> Steps[Commit]:
    """One stop answers all stop requests up to now; every other kind of request gets an answer of its own."""
    if pending.alone is not None:
        answer = yield from _answer(run, state, epoch, pending.alone, pulse)
    elif pending.stop is not None:
        answer = Stop(reason=pending.stop)
    else:
        answer = refuse(pending.refused)
    return structs.replace(answer, request=pending.newest)


def _answer(run: RunFormat, state: RunState, epoch: int, request: Request, pulse: Pulse) -> Steps[Commit]:
    match request.kind:
        case "quarantine":
            return _quarantined(run, state, request)
        case "readmit":
            return _readmitted(state, request)
        case "revoke":
            return _revoked(run, state, request)
        case "rollback":
            return (yield from _rolled_back(run, state, epoch, request, pulse))
        case "gc":
            floor = floor_by_request(run, state, request.to)
            return refuse(floor) if isinstance(floor, str) else collected(floor, "diloco gc")
    return refuse(f"a {request.kind} without all that it needs")


def refuse(reason: str) -> Commit:
    return Refuse(reason=reason[:MAX_REASON])


def _quarantined(run: RunFormat, state: RunState, request: Request) -> Commit:
    name = request.learner or ""
    refused = why_not_quarantined(name, state, run)
    if refused:
        return refuse(refused)
    return Quarantine(learner=name, reason=(request.reason or "by request")[:MAX_REASON])


def _readmitted(state: RunState, request: Request) -> Commit:
    name = request.learner or ""
    if state.learner(name).quarantined is None:
        return refuse(f"{name!a} is not quarantined")
    return Readmit(learner=name, reason=(request.reason or "by request")[:MAX_REASON])


def _revoked(run: RunFormat, state: RunState, request: Request) -> Commit:
    key = request.key or ""
    if run.signing is None:
        return refuse("this run is not signed: it has no keys")
    if not is_public_key(key) or key in state.revoked:
        return refuse("it is revoked already" if key in state.revoked else f"{key[:MAX_KEY]!a} is no public key")
    if key == run.signing.operator:
        return refuse("the operator's own key cannot be revoked: start a new run under another one")
    return Revoke(key=key, learner=request.learner, reason=(request.reason or "by request")[:MAX_REASON])


def _rolled_back(run: RunFormat, state: RunState, epoch: int, request: Request, pulse: Pulse) -> Steps[Commit]:
    then = yield from return_to(run, state, request.to, pulse)
    if isinstance(then, str):
        return refuse(f"no rollback: {then}")
    outputs = yield from published_anew(run, then.outputs, state.n + 1, state.slot - 1, epoch, pulse)
    if isinstance(outputs, str):
        return refuse(f"no rollback to commit {request.to}: {outputs}")
    return back_to(then, outputs, f"{state.merges - then.merges} merges no longer count")


class StandIn:
    """Serves the log for as long as one operator's command needs it, while no syncer does."""

    def __init__(self, run: RunFormat, claim: ProcessClaim, time: str, nonce: Callable[[], str]) -> None:
        self.run, self.claim, self.time, self.nonce = run, claim, time, nonce
        self.state = RunState()
        self.epoch = 0

    def serve(self) -> Steps[RunState]:
        """Answer the pending requests, leave the run running or stopped as it was, and collect behind a floor that this
        raised. Does nothing if the run has ended, has no first version yet (only a syncer can make that), or has no
        pending request. Raises FencedError if a syncer takes over in between."""
        self.state = yield from whole_log(self.run)
        if self.state.n < 0 or self.state.phase == RunPhase.FINISHED:
            return self.state
        if (yield from pending_requests(self.run, self.state)) is None:
            return self.state
        self.epoch = yield from claim_epoch(self.run, self.claim, self.state)
        before = yield from self._begin()
        floor = self.state.gc_floor
        while self.state.phase == RunPhase.RUNNING:
            pending = yield from pending_requests(self.run, self.state)
            if pending is None:
                break
            answer = yield from answer_to(self.run, self.state, self.epoch, pending, no_pulse)
            yield from self._commit(answer)
        if before == RunPhase.STOPPED and self.state.phase == RunPhase.RUNNING:
            yield from self._commit(Stop(reason="as it was before"))
        if self.state.gc_floor > floor:  # last, because it takes long; a syncer goes on with it if it is interrupted
            yield from self._collect()
        return self.state

    def _begin(self) -> Steps[str]:
        """This epoch's first commit; returns the run's phase just before it."""
        mine = False
        while not mine:
            before = self.state.phase
            if before == RunPhase.FINISHED:
                return before
            who = f"{self.claim.host} pid {self.claim.pid}, a command"
            mine = yield from self._commit(EpochStart(reason=who, serves=False))
        return before

    def _commit(self, draft: Commit) -> Steps[bool]:
        mine = structs.replace(
            draft, epoch=self.epoch, nonce=self.nonce(), time=self.time, software=self.claim.software
        )
        self.state, appended = yield from append(self.run, self.state, mine)
        return appended

    def _collect(self) -> Steps[None]:
        collector = Collector(self.run)
        while True:
            now_s: float = yield Now()
            collector.look(self.state, now_s)
            if collector.is_done(self.state):
                return
            worked = yield from collector.work(self.state, now_s, budget_s=1.0)
            if not worked:
                yield Sleep(max(0.01, collector.starts_s - now_s))
