"""What the log says once it is folded (commits.py folds it), and the states of processes.

A process changes its own state through `moved` alone. ARCHITECTURE.md draws the tables of states, and that of a unit on
a machine (runtime/units.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from diloco_cli.errors import DilocoError
from diloco_cli.layout import Layout
from diloco_cli.protocol.log.health import (
    Norms,
    Stability,
)
from diloco_cli.protocol.log.keys import fingerprint, key_of
from diloco_cli.protocol.log.metrics import Metrics
from diloco_cli.protocol.log.records import (
    FragmentVersion,
    Island,
    MergedOffer,
    Outcome,
    RunFormat,
)


class LearnerState(StrEnum):
    STARTING = "STARTING"  # it loads the newest committed versions: the first incarnation
    RECOVERING = "RECOVERING"  # likewise, after a failure
    TRAINING = "TRAINING"
    WAITING = "WAITING"  # it pauses: the drift bound, or a quarantine
    DRAINING = "DRAINING"  # it was told to leave and awaits the outcome of its offers
    FENCED = "FENCED"  # a newer incarnation has its place
    DONE = "DONE"
    FAILED = "FAILED"


class SyncerState(StrEnum):
    READING = "READING"  # the log, to its end
    CLAIMING = "CLAIMING"  # an epoch
    SERVING = "SERVING"
    MERGING = "MERGING"
    FINISHING = "FINISHING"  # the last evaluation, and an outcome for every offer
    FENCED = "FENCED"  # a syncer of a higher epoch serves
    DONE = "DONE"


class StandbyState(StrEnum):
    STANDING_BY = "STANDING_BY"
    CLAIMING = "CLAIMING"  # it loads what a syncer needs, and takes over unless one has come meanwhile
    DONE = "DONE"  # the run is over


class RunPhase(StrEnum):
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    FINISHED = "FINISHED"


_L, _S, _B, _R = LearnerState, SyncerState, StandbyState, RunPhase
_OVER = {_L.DONE, _L.FENCED, _L.FAILED}
LEARNER: Mapping[LearnerState, AbstractSet[LearnerState]] = {
    _L.STARTING: {_L.RECOVERING, _L.TRAINING, _L.WAITING, _L.DRAINING, *_OVER},
    _L.RECOVERING: {_L.TRAINING, _L.WAITING, _L.DRAINING, *_OVER},
    _L.TRAINING: {_L.WAITING, _L.DRAINING, *_OVER},
    _L.WAITING: {_L.TRAINING, _L.DRAINING, *_OVER},
    _L.DRAINING: _OVER,
    **dict.fromkeys(_OVER, frozenset()),
}
SYNCER: Mapping[SyncerState, AbstractSet[SyncerState]] = {
    _S.READING: {_S.CLAIMING, _S.DONE},
    _S.CLAIMING: {_S.SERVING, _S.FENCED, _S.DONE},
    _S.SERVING: {_S.MERGING, _S.FINISHING, _S.FENCED, _S.DONE},
    _S.MERGING: {_S.SERVING, _S.FENCED, _S.DONE},
    _S.FINISHING: {_S.SERVING, _S.FENCED, _S.DONE},
    _S.FENCED: frozenset(),
    _S.DONE: frozenset(),
}
STANDBY: Mapping[StandbyState, AbstractSet[StandbyState]] = {
    _B.STANDING_BY: {_B.CLAIMING, _B.DONE},
    _B.CLAIMING: {_B.STANDING_BY, _B.DONE},
    _B.DONE: frozenset(),
}
RUN: Mapping[RunPhase, Mapping[str, RunPhase]] = {  # by the kind of a commit; other kinds leave a run RUNNING
    _R.RUNNING: {"stop": _R.STOPPED, "finish": _R.FINISHED},
    _R.STOPPED: {"epoch_start": _R.RUNNING},
    _R.FINISHED: {},
}
State = TypeVar("State", LearnerState, SyncerState, StandbyState)


class IllegalStateError(DilocoError):
    """A transition that the state's table does not have: an error of this program."""

    code = "illegal_state"


def phase_after(phase: RunPhase, kind: str) -> RunPhase | None:
    """Of the run after one more commit; None: no commit of this kind may come now."""
    return RUN[phase].get(kind, phase if phase == RunPhase.RUNNING else None)


def moved(table: Mapping[State, AbstractSet[State]], now: State, to: State) -> State:
    """`to`, if that is the present state or an allowed transition leads there. Raises IllegalStateError."""
    if to != now and to not in table[now]:
        kind = type(now).__name__
        raise IllegalStateError(
            f"{kind} cannot go from {now} to {to}; allowed: {', '.join(sorted(table[now])) or 'nothing, it is over'}",
            hint="this is a bug in diloco: please report it",
        )
    return to


class Applied(Struct, frozen=True, gc=False):
    """The last offer of one learner that a merge applied to one fragment."""

    base: int
    produced: int
    data_end: int
    incarnation: int
    seq: int


class LearnerRecord(Struct, frozen=True):
    """What the log says of a learner. `floor`: offers of older incarnations are refused. Every offer of incarnation
    `floor` with seq < next_seq has an outcome, and so have those in `settled`. `token_parameters`: what is believed of
    its work, `doubted`: what it has stated beyond that, since the newest rollback; `proven`: its proven tokens/s
    (0: as planned; protocol/rules/belief.py). `bad_in_a_row`: its bad offers since the last one that was merged
    (health.py); `quarantined`: the commit of its quarantine, None if there is none."""

    floor: int = 0
    next_seq: int = 0
    settled: tuple[int, ...] = ()
    applied: dict[int, Applied] = field(default_factory=dict)
    token_parameters: int = 0
    doubted: int = 0
    proven: float = 0.0
    merges: int = 0
    refused: int = 0
    data_end: int = 0
    bad_in_a_row: int = 0
    quarantined: int | None = None

    def has_outcome(self, seq: int) -> bool:
        return seq < self.next_seq or seq in self.settled

    def settling(self, offers: Sequence[MergedOffer | Outcome]) -> LearnerRecord:
        """With the outcomes of these offers of the learner. The first one of a newer incarnation raises the floor."""
        first = offers[0]
        if len(offers) == 1 and first.seq == self.next_seq and first.incarnation == self.floor and not self.settled:
            return replace(self, next_seq=self.next_seq + 1)  # the usual case, and thousands of them
        known, floor = self, max(offer.incarnation for offer in offers)
        if floor > self.floor:
            known = replace(self, floor=floor, next_seq=0, settled=())
        settled = set(known.settled) | {offer.seq for offer in offers if offer.incarnation == known.floor}
        next_seq = known.next_seq
        while next_seq in settled:
            next_seq += 1
        return replace(known, next_seq=next_seq, settled=tuple(sorted(seq for seq in settled if seq > next_seq)))


_UNHEARD_OF = LearnerRecord()


class Window(Struct, frozen=True):
    """What the newest merge says of the slots after it. The window of the next slot begins `opens_s` after its commit,
    that of each further slot `slot_s` later; a window closes `grace_s` after it begins, or when all expected learners
    have offered. `slot_s` 0: the pace, and so the windows, are not known yet."""

    opens_s: float
    slot_s: float
    grace_s: float


class RunState(Struct, frozen=True, dict=True):
    """Everything that commits 0..n say. `token_parameters` = sum over applied offers of believed tokens x parameters of
    the fragment, as an integer, so that no rounding ever enters the token count. Offers whose merge a rollback has
    undone no longer count in it; the counts of merges, skips and offers include them.

    `base_floor`: the newest rollback (0: none); no delta may be based on a version before it. `rollbacks`: the
    newest ones, each as (the commit that it went back to, its own number). `gc_floor`: objects that only commits before
    this one need may be deleted (0: none are). `moments_from`: if later rollbacks undid no merge, the newest rollback
    that did (None: `base_floor` is that one).

    `revoked`: the public keys that commits have revoked, each with its commit. `epoch_key`: the public key under which
    the present epoch counts; empty in an unsigned run.

    `window`: the window of the newest merge, None before the first merge.
    `norms`: what is remembered of the lengths of deltas (health.py).
    `fruitless`: syncers that have begun to serve since the newest merge (or the first versions) without a merge.
    `served`: whether the newest epoch is a syncer's; that of a command ends with the command.
    `format`: the digest of FORMAT.json, as commit 0 names it.
    """

    n: int = -1
    digest: str = ""
    epoch: int = 0
    phase: RunPhase = RunPhase.RUNNING
    slot: int = 0
    token_parameters: int = 0
    outputs: tuple[FragmentVersion, ...] = ()
    history: tuple[FragmentVersion, ...] = ()
    learners: dict[str, LearnerRecord] = field(default_factory=dict)
    next_request: int = 0
    merges: int = 0
    members: tuple[Island, ...] = ()
    base_floor: int = 0
    rollbacks: tuple[tuple[int, int], ...] = ()
    gc_floor: int = 0
    fruitless: int = 0
    served: bool = False
    window: Window | None = None
    moments_from: int | None = None
    stability: Stability = Stability()
    revoked: dict[str, int] = field(default_factory=dict)
    epoch_key: str = ""
    format: str = ""
    norms: Norms = field(default_factory=dict)
    metrics: Metrics = Metrics()

    def with_members(self, run: RunFormat) -> RunFormat:
        """The run with the islands that have joined it so far."""
        return run.grown(self.members)

    def tokens(self, layout: Layout) -> int:
        """Merged tokens: sum over applied offers of believed tokens x (parameters of the fragment / all parameters)."""
        return self.token_parameters // layout.num_parameters

    @cached_property
    def stated_parameters(self) -> int:
        """As `token_parameters`, of what is stated."""
        return sum(known.token_parameters + known.doubted for known in self.learners.values())

    def version(self, fragment: int, version: int) -> FragmentVersion | None:
        """A version that is still known for re-anchoring; None if it is not."""
        return self._versions.get((fragment, version))

    @cached_property
    def _versions(self) -> dict[tuple[int, int], FragmentVersion]:
        return {(output.fragment, output.version): output for output in reversed(self.history)}

    def learner(self, name: str) -> LearnerRecord:
        return self.learners.get(name, _UNHEARD_OF)

    def counts(self, incarnation: int) -> bool:
        """Whether the key under which this incarnation writes is not revoked."""
        return not self.revoked or key_of(incarnation) not in self._revoked_keys

    @cached_property
    def _revoked_keys(self) -> frozenset[int]:
        return frozenset(map(fingerprint, self.revoked))

    @property
    def rolled_back_to(self) -> int:
        """The commit that the newest rollback went back to; 0: none."""
        return self.rollbacks[-1][0] if self.rollbacks else 0

    @property
    def moments_floor(self) -> int:
        """Moments saved before this commit belong to merges that a rollback has undone."""
        return self.base_floor if self.moments_from is None else self.moments_from

    @property
    def participation(self) -> float | None:
        """Mean over merges of participants / islands alive."""
        return self.metrics.participation_sum / self.merges if self.merges else None
