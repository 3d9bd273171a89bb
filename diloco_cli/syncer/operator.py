"""An operator's request: put to the syncer that serves the run and awaited; with no syncer alive, carried out here."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from diloco_cli import __version__
from diloco_cli.clock import utc_now_text
from diloco_cli.errors import FencedError, TryAgainError, UsageError
from diloco_cli.layout import Layout
from diloco_cli.protocol.actors.requests import StandIn, ask, is_at_rest, withdraw_stop
from diloco_cli.protocol.actors.standby import has_left, slowest_s
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.commits import Commit, Refuse
from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES, Beats, moving_s, of_syncer, tolerated_s
from diloco_cli.protocol.log.keys import SYNCER, commit_key, heartbeat_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, ProcessClaim, RequestKind, RunFormat, decode
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.protocol.regions import Home
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import Clock, perform
from diloco_cli.signing import OPERATOR
from diloco_cli.store.port import Store
from diloco_cli.syncer.regions import RegionServices

SYNCER_ANSWERS_S = 10.0
LOOK_EVERY_S = 0.1
REGIONS_WITHIN_S = 10.0
ANSWERED_BY: dict[RequestKind, str] = {
    "rollback": "rollback",
    "gc": "gc_floor",
    "quarantine": "quarantine",
    "readmit": "readmit",
    "revoke": "revoke",
}
NAMES: dict[RequestKind, str] = {
    "rollback": "a rollback",
    "gc": "garbage collection",
    "quarantine": "a quarantine",
    "readmit": "the end of a quarantine",
    "revoke": "revoking a key",
}
Result = TypeVar("Result")


@dataclass(frozen=True)
class Operator:
    """`tell` gets a line for a person where the work takes another way than usual. `timeout_s`: seconds of the syncer's
    silence after which it counts as gone; None: 10, and what the largest fragment takes, or twice the longest that it
    has needed. `regions`: URLs of the buckets of regions that may be written from here."""

    run: RunFormat
    store: Store
    clock: Clock
    tell: Callable[[str], None]
    timeout_s: float | None = None
    regions: tuple[str, ...] = ()

    def head(self, known: RunState | None = None) -> RunState:
        """The log, read to its end; what `known` holds is not read again."""
        return self._perform(read_log(self.run, known))

    def request(
        self,
        kind: RequestKind,
        reason: str = "",
        *,
        learner: str | None = None,
        to: int | None = None,
        key: str | None = None,
    ) -> RunState:
        """The head of the log after the answer. Raises UsageError with the log's text if it was a refusal."""
        before, patient = self.head(), kind != "revoke"
        number = self._ask(before, kind, reason, learner, to, key)
        state = self._answered(before, number, patient)
        if state.next_request <= number:
            self.tell("no syncer answers: doing it from here")
            state = self._answer_here(number, patient)
        if state.next_request <= number:
            refuse_finished(self.run.name, state, kind)
            hint = f"diloco resume {self.store.url}"
            if kind == "revoke":
                hint += "; if a process with that key serves the run, take its credentials for the bucket away first"
            raise TryAgainError("the request waits for the next syncer", hint=hint)
        refused = self._refusal(range(before.n + 1, state.n + 1), number, ANSWERED_BY[kind])
        if refused is not None:
            raise UsageError(refused, where=self.run.name)
        return state

    def stop(self, state: RunState, reason: str) -> RunState:
        """The head of the log after the stop. Raises TryAgainError if neither a syncer nor this process could commit
        it."""
        number = self.request_stop(reason, state)
        state = self._answered(state, number)
        if state.phase != RunPhase.RUNNING:
            return state
        self.tell("no syncer answers: committing the stop from here")
        state = self._answer_here(number)
        if state.phase == RunPhase.RUNNING:
            hint = f"diloco status {self.store.url}"
            what = "the run has not begun, or its syncer is busy: the stop is asked for, and waits for a syncer"
            raise TryAgainError(what, hint=hint)
        return state

    def request_stop(self, reason: str, state: RunState | None = None) -> int:
        """Write the request and return its number; the syncer carries it out. `state`: the head, if it was read."""
        state = self.head() if state is None else state
        return self._ask(state, "stop", reason)

    def withdraw_stop(self, state: RunState) -> bool:
        """Before units start: a stopped run goes on only after this, and a stop request that no syncer has answered
        (Ctrl-C while the syncer was down) must not stop it later. True if there was a stop to withdraw. Raises
        UsageError if that takes the operator's key, which is not here."""
        if not self.run.keyring.holds(OPERATOR) and state.phase == RunPhase.STOPPED:
            if not self._perform(is_at_rest(self.run, state)):
                return False
            hint = f"where the operator's key is: diloco resume {self.store.url}"
            raise UsageError(f"run {self.run.name} is stopped, and only its operator resumes it", hint=hint)
        return self._perform(withdraw_stop(self.run, state, nonce(), utc_now_text()))

    def keep_stopped(self, state: RunState) -> bool:
        """Of a stopped run: withdraw a resume that nobody has carried out yet. True if there was one."""
        if self._perform(is_at_rest(self.run, state)):
            return False
        self.request_stop("diloco stop", state)
        return True

    def _ask(
        self,
        state: RunState,
        kind: RequestKind,
        reason: str,
        learner: str | None = None,
        to: int | None = None,
        key: str | None = None,
    ) -> int:
        """Write the request and return its number."""
        asked = ask(
            state, kind, nonce(), utc_now_text(), reason, learner=learner, to=to, revoke=key, keyring=self.run.keyring
        )
        return self._perform(asked)

    def _perform(self, steps: Steps[Result]) -> Result:
        return perform(steps, self.store, self.clock)

    def _answered(self, state: RunState, number: int, patient: bool = True) -> RunState:
        """Wait as long as a syncer lives: its heartbeat changes every few seconds, but while it moves one version. Not
        `patient`: no longer than a syncer may be silent, for it may be its own key that is to be revoked."""
        heartbeat, heard_s, beats = self._heartbeat(state), self.clock.now_s(), Beats()
        beats.is_new(heartbeat)
        silence_s = max_silence_s(self.timeout_s, heartbeat, self.run.layout)
        if silence_s > SYNCER_ANSWERS_S + 1.0:
            self.tell(f"the syncer may be at work in silence: it counts as gone after {silence_s:.0f} s of it")
        while self.clock.now_s() - heard_s < silence_s:
            if state.next_request > number or state.phase != RunPhase.RUNNING:
                break
            self.clock.sleep_s(LOOK_EVERY_S)
            state = self.head(state)
            if patient and beats.is_new(self._heartbeat(state)):
                heard_s = self.clock.now_s()
        return state

    def _heartbeat(self, state: RunState) -> bytes | None:
        found = self.store.get(heartbeat_key(SYNCER), MAX_HEARTBEAT_BYTES)
        return of_syncer(self.run.keyring.without(state.revoked), found)

    def _answer_here(self, number: int, patient: bool = True) -> RunState:
        """Answer all pending requests; this process serves the log for that long. A syncer that comes or wakes
        meanwhile answers what is left; `patient`: see _answered."""
        claim = ProcessClaim(0, nonce(), socket.gethostname(), os.getpid(), utc_now_text(), __version__)
        try:
            state = self._perform(StandIn(self.run, claim, utc_now_text(), nonce).serve())
        except FencedError:
            return self._answered(self.head(), number, patient)
        self.tell_regions(state)
        return state

    def tell_regions(self, head: RunState) -> None:
        """While no syncer serves: mirror the commits made here to the regions' own buckets, as far as possible within
        some seconds; the next syncer completes the rest."""
        left_out = {region.url: region.name for region in self.run.regions if region.url not in self.regions}
        for url, name in left_out.items():
            self.tell(
                f"region {name}: left out, as this machine has not consented to {url}, which the run's format names;"
                f" the next syncer of the run completes it"
            )
        services = RegionServices(self.run, self.store, Home(lambda: head), tell=self.tell, without=left_out)
        services.start()
        services.end(over=True, within_s=REGIONS_WITHIN_S)

    def _refusal(self, since: range, number: int, answer: str) -> str | None:
        """Why the request was not carried out, from the commit that answered it, which is the first in `since` to name
        this number or a higher one; None if it was carried out."""
        for n in since:
            data = self.store.get(commit_key(n), MAX_RECORD_BYTES)
            commit = decode(Commit, data or b"", commit_key(n))
            if commit.request is not None and commit.request >= number:
                said = commit.reason
                if not isinstance(commit, Refuse):
                    said = f"not carried out: the run was stopped first (commit {n}, a {commit.kind}: {commit.reason})"
                return None if commit.kind == answer else said
        return None


def refuse_finished(name: str, state: RunState, kind: RequestKind) -> None:
    """Raises UsageError for a run that is FINISHED."""
    if state.phase == RunPhase.FINISHED:
        hint = f"its parameters: diloco export {name}"
        raise UsageError(f"run {name} is FINISHED: {NAMES[kind]} is for runs that go on", hint=hint)


def max_silence_s(timeout_s: float | None, heartbeat: bytes | None, layout: Layout) -> float:
    """How long a syncer with this last heartbeat may be silent. A command must not fence a syncer that is only slow (a
    large fragment, a slow link): the command leaves again, and the run would have no syncer."""
    if timeout_s is not None:
        return timeout_s
    if has_left(heartbeat):
        return SYNCER_ANSWERS_S
    return tolerated_s(SYNCER_ANSWERS_S + moving_s(layout), slowest_s(heartbeat), layout)
