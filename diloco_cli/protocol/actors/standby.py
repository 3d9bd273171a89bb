"""A standby: watches the log and the syncer's heartbeat, and takes over when both have fallen silent.

It serves liveness only. Silence is measured on the standby's own monotonic clock, and the log alone decides which
process serves: a needless takeover costs time and nothing else. A standby holds no model and reads two objects a look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from diloco_cli.errors import DilocoError
from diloco_cli.protocol.actors.progress import is_over
from diloco_cli.protocol.actors.requests import is_at_rest
from diloco_cli.protocol.log.claims import newest_epoch
from diloco_cli.protocol.log.commit_log import read_log, refuse_revoked
from diloco_cli.protocol.log.heartbeats import (
    MAX_HEARTBEAT_BYTES,
    Beats,
    SyncerHeartbeat,
    moving_s,
    of_syncer,
    sealed,
    tolerated_s,
)
from diloco_cli.protocol.log.keys import SYNCER, epoch_key, heartbeat_key, standby_heartbeat_key
from diloco_cli.protocol.log.mending import MOST_WANTED, Mender, heard_from_syncer, patient_log, wanted_by
from diloco_cli.protocol.log.operations import Get, Now, Put, Sleep, Steps
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, ProcessClaim, RecordError, RunFormat, decode, decode_plain
from diloco_cli.protocol.log.state import STANDBY, RunPhase, RunState, StandbyState, SyncerState, moved
from diloco_cli.protocol.rules.quorum import Pace, alive_within_s
from diloco_cli.signing import LOG

SPREAD = 0.5  # of the patience, drawn at random: two standbys rarely take over at once
POLL_S = 2.0
PROMPT_S = 3.0  # within this time a standby takes over a run that no syncer serves yet
HEARD_WITHIN_S = 7.0  # whoever has begun to serve, and lives, is heard twice
FIRST_SYNCER_S = 45.0  # which a new run's own syncer may take to start, on a busy machine
HEARTBEAT_EVERY_S = 6.0
MAX_DOUBLINGS = 6
SHORTEST_SLEEP_S = 0.01


def takeover_s(run: RunFormat) -> float:
    """The usual silence after which a standby takes over: the setting, or the time for which a peer counts as alive."""
    setting = run.settings.syncer.takeover_s
    if setting != "auto":
        return setting
    return alive_within_s(Pace(min(i.local_steps * i.step_s for i in run.islands) / run.num_fragments))


def gone_after_s(run: RunFormat, usual_s: float, heartbeat: bytes | None) -> float:
    """After what silence a syncer with this last heartbeat counts as gone: the usual one, and what a version takes that
    it may be moving, unless the setting says how long; or longer, by what it states. One that has left is no longer
    waited for than usual."""
    if has_left(heartbeat):
        return usual_s
    least_s = usual_s + (moving_s(run.layout) if run.settings.syncer.takeover_s == "auto" else 0.0)
    return tolerated_s(least_s, slowest_s(heartbeat), run.layout)


def patience_s(least_s: float, jitter: float, fruitless: int) -> float:
    """How long a silence this standby waits for. `jitter` in [0, 1) differs between standbys.

    Doubled for each syncer that served and merged nothing: else standbys would interrupt each other's slow merge
    again and again."""
    return float(least_s * (1 + SPREAD * jitter) * 2 ** min(fruitless, MAX_DOUBLINGS))


@dataclass
class Silence:
    """How long this standby has looked and seen nothing new. Time in which it could not look (a paused process, a store
    that did not answer) says nothing about the syncer: so a look adds two intervals at most."""

    poll_s: float
    silent_s: float = 0.0
    _n: int | None = None
    _beats: Beats = field(default_factory=Beats)
    _looked_s: float | None = None

    def look(self, n: int, heartbeat: bytes | None, now_s: float) -> bool:
        """Note the head of the log and the syncer's genuine heartbeat; True if either is new since the look before."""
        since_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self.silent_s += min(since_s, 2 * self.poll_s)
        self._looked_s = now_s
        before, self._n = self._n, n
        is_new = self._beats.is_new(heartbeat) or n != before
        if before is None or not is_new:
            return False
        self.silent_s = 0.0
        return True


def nothing() -> Steps[None]:
    yield from ()


@dataclass
class Standby:
    """One standby process. `instead_of`: the pid of its predecessor on this host, which the supervisor knows to be
    dead; if that predecessor served, the standby takes over at once. `alike`: the run has no syncer unit beside its
    standbys. `facts`: further fields of its heartbeat; `tell`: takes which records it has put back. `load`: gets what
    a syncer needs; on a busy machine or a slow disk that takes longer than others wait, so it comes before the takeover
    is told, and the syncer is looked for once more after it."""

    run: RunFormat
    claim: ProcessClaim
    name: str
    jitter: float
    instead_of: int | None = None
    facts: Callable[[], dict[str, Any]] = dict
    tell: Callable[[str], None] = lambda text: None
    alike: bool = False
    load: Callable[[], Steps[None]] = nothing
    doing: StandbyState = field(default=StandbyState.STANDING_BY, init=False)
    _next_heartbeat_s: float = field(default=0.0, init=False)

    def wait(self) -> Steps[str | None]:
        """Wait; the reason to take over, or None once the run is over. A stop from before this process does not end it;
        but it serves a stopped run only once `diloco resume` has asked for that."""
        usual_s = takeover_s(self.run)
        silence, mender = Silence(min(POLL_S, usual_s / 5)), Mender(self.run, self.tell)
        state: RunState = yield from patient_log(self.run, asks=self._ask_for)
        began_at, rested, ready = state.n, False, False
        unserved, follows = (yield from self._begins(state)), self.alone
        dead = yield from self._predecessor_served(state)
        while not is_over(state, began_at):
            refuse_revoked(self.run, state, LOG)
            if (yield from is_at_rest(self.run, state)):
                rested, state = True, (yield from self._rest(state, silence.poll_s))
                continue
            if state.phase == RunPhase.STOPPED and rested:
                unserved, rested = self.alone, False
            found: bytes | None = yield Get(heartbeat_key(SYNCER), MAX_HEARTBEAT_BYTES)
            heartbeat = of_syncer(self.run.keyring.without(state.revoked), found)
            now_s: float = yield Now()
            unserved = not silence.look(state.n, heartbeat, now_s) and unserved
            limit_s = patience_s(gone_after_s(self.run, usual_s, heartbeat), self.jitter, state.fruitless)
            follows = follows or (heartbeat is not None and not has_left(heartbeat))
            left = follows and state.phase == RunPhase.RUNNING and has_left(heartbeat, state.epoch)
            another = unserved and self._is_another(heartbeat)
            if left or (unserved and not another):
                limit_s = PROMPT_S * self.jitter
            elif another and state.n >= 0:
                limit_s = HEARD_WITHIN_S + PROMPT_S * self.jitter
            elif state.phase == RunPhase.STOPPED or state.n < 0:
                limit_s += FIRST_SYNCER_S
            if dead or silence.silent_s >= limit_s:
                reason = f"{self.name} takes over, {_reason(state, silence.silent_s, unserved, dead, left)}"
                self.doing = moved(STANDBY, self.doing, StandbyState.CLAIMING)
                if ready:
                    yield from self._announce(heartbeat, reason, state.n)
                    return reason
                self._next_heartbeat_s = 0.0
                yield from self._heartbeat(now_s, state, reason)
                yield from self.load()
                self.doing = moved(STANDBY, self.doing, StandbyState.STANDING_BY)
                ready, state = True, (yield from read_log(self.run, state))
                dead = yield from self._predecessor_served(state)
                continue
            heard = f"the syncer was heard {silence.silent_s:.0f} s ago; takes over after {limit_s:.0f} s of silence"
            yield from self._heartbeat(now_s, state, heard)
            yield from mender.follow(state, now_s)
            yield Sleep(max(SHORTEST_SLEEP_S, min(silence.poll_s, limit_s - silence.silent_s)))
            state = yield from read_log(self.run, state)
        self.doing = moved(STANDBY, self.doing, StandbyState.DONE)
        return None

    def _ask_for(self, error: DilocoError) -> Steps[None]:
        """Tell those who may hold it what cannot be read, as a syncer that begins does; there may be none. This adds it
        to the last words of the one before, so it is no news of that one, and its goodbye still counts; one that serves
        puts its next heartbeat over it."""
        said: SyncerHeartbeat | None = yield from heard_from_syncer(self.run, RunState())
        said = said or SyncerHeartbeat(self.doing, 0, -1, self.claim.host, unit=self.name)
        wants = tuple(dict.fromkeys((*wanted_by(error), *said.wants)))[:MOST_WANTED]
        if wants != said.wants:  # written once more, it would make that one seem alive, or hide its goodbye
            yield self._put(heartbeat_key(SYNCER), replace(said, reason=str(error), wants=wants))

    def _rest(self, state: RunState, poll_s: float) -> Steps[RunState]:
        yield from self._heartbeat((yield Now()), state, "the run is stopped: waits for `diloco resume`")
        yield Sleep(poll_s)
        return (yield from read_log(self.run, state))

    @property
    def alone(self) -> bool:
        """Whether no unit of another kind begins to serve."""
        return self.alike or self.run.settings.syncer.on_learners

    def _is_another(self, heartbeat: bytes | None) -> bool:
        """Whether somebody else has begun to serve, and did not leave. One of this name was this one's predecessor."""
        said = _plain(heartbeat)
        return bool(said) and said.get("unit") != self.name and not has_left(heartbeat)

    def _begins(self, state: RunState) -> Steps[bool]:
        """Whether nobody has served the run yet, or since it was stopped and resumed, and a standby is to begin."""
        if not self.alone:
            return False
        if state.n >= 0:
            return state.phase == RunPhase.STOPPED or not state.served
        claimed = yield Get(epoch_key(1), MAX_RECORD_BYTES)
        return claimed is None

    def _predecessor_served(self, state: RunState) -> Steps[bool]:
        """Whether the newest epoch was claimed by the process that this one replaces."""
        if self.instead_of is None:
            return False
        newest = yield from newest_epoch(max(0, state.epoch - 1))
        try:
            claim = None if newest is None else decode(ProcessClaim, newest[1], epoch_key(newest[0]))
        except RecordError:
            return False
        return claim is not None and (claim.host, claim.pid) == (self.claim.host, self.instead_of)

    def _announce(self, heartbeat: bytes | None, reason: str, n: int) -> Steps[None]:
        """Tell the other standbys long before the next commit; the counts of the old syncer are kept."""
        facts = {
            **counts_of(heartbeat),
            "state": self.doing,
            "host": self.claim.host,
            "unit": self.name,
            "reason": reason,
            "memory_bytes": 0,
            "mirrors": _plain(heartbeat).get("mirrors", []),
        }
        yield self._put(heartbeat_key(SYNCER), {**facts, "epoch": 0, "n": n})
        if self._next_heartbeat_s > 0:  # this process is no standby any more: its heartbeats are the syncer's now
            last = SyncerHeartbeat(StandbyState.DONE, 0, -1, self.claim.host, reason)
            yield self._put(standby_heartbeat_key(self.name), last)

    def _put(self, key: str, heartbeat: object) -> Put:
        return Put(key, sealed(self.run.keyring, LOG, key, heartbeat))

    def _heartbeat(self, now_s: float, state: RunState, reason: str) -> Steps[None]:
        if now_s < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = now_s + HEARTBEAT_EVERY_S
        facts = {
            "state": self.doing,
            "epoch": state.epoch,
            "n": state.n,
            "host": self.claim.host,
            "reason": reason,
            "unit": self.name,
            **self.facts(),
        }
        yield self._put(standby_heartbeat_key(self.name), facts)


def _reason(state: RunState, silent_s: float, unserved: bool, dead: bool, left: bool) -> str:
    if dead:
        return "its predecessor, which served, is dead"
    if left:
        return f"epoch {state.epoch} has left"
    if unserved:
        return "no syncer served the run"
    who = f"epoch {state.epoch}" if state.epoch else "the first syncer"
    return f"{who} was silent for {silent_s:.1f} s"


def counts_of(heartbeat: bytes | None) -> dict[str, int]:
    """The integers of a syncer's last heartbeat, from which its successor goes on."""
    return {key: value for key, value in _plain(heartbeat).items() if isinstance(value, int)}


def _plain(heartbeat: bytes | None) -> dict[str, Any]:
    try:
        return decode_plain(heartbeat, heartbeat_key(SYNCER)) if heartbeat is not None else {}
    except RecordError:
        return {}


def has_left(heartbeat: bytes | None, epoch: int = 0) -> bool:
    """Whether it is the last one of a syncer that has ended in good order, and no epoch since has begun by `epoch`."""
    is_last = _plain(heartbeat).get("state") == SyncerState.DONE
    return is_last and counts_of(heartbeat).get("epoch", 0) >= epoch


def slowest_s(heartbeat: bytes | None) -> float:
    """The syncer's longest silence by its own heartbeat: a hint."""
    said = _plain(heartbeat).get("slowest_s", 0.0)
    return float(said) if isinstance(said, int | float) and 0 < said < inf else 0.0
