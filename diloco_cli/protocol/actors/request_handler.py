"""Answers to operators' requests: one commit that names the request.

The process that serves the log answers: the syncer, or, while no syncer is alive, the operator's own command, which
claims an epoch for that, commits and leaves.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from diloco_cli.protocol.actors.collection import Collector, collected, floor_by_request
from diloco_cli.protocol.actors.requests import MAX_REASON, Pending, pending_requests
from diloco_cli.protocol.actors.rollback import published_anew, return_to
from diloco_cli.protocol.log.commit_log import Pulse, append, no_pulse, read_log
from diloco_cli.protocol.log.commits import Commit, EpochStart, Quarantine, Readmit, Refuse, Revoke, Stop
from diloco_cli.protocol.log.epochs import claim_epoch
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.records import ProcessClaim, Request, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.states import RunPhase
from diloco_cli.protocol.rules.eligibility import why_not_quarantined
from diloco_cli.signing import is_public_key

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
    found = yield from return_to(run, state, request.to, pulse)
    if isinstance(found, str):
        return refuse(f"no rollback: {found}")
    outputs = yield from published_anew(run, found.then.outputs, state.n + 1, state.slot - 1, epoch, pulse)
    if isinstance(outputs, str):
        return refuse(f"no rollback to commit {request.to}: {outputs}")
    return found.commit(outputs)


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
        self.state = yield from read_log(self.run)
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
        )  # fmt: skip
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
