"""The log, folded: all readers of the same commits have the same state; and the states of processes.

`apply` is the only way to change the folded state, one commit at a time: a pure function of the state and the record.
A process changes its own state through `moved` alone. ARCHITECTURE.md draws the tables of states, and that of a unit on
a machine (runtime/units.py).

Which key may sign which commit of a signed run:

    A revoked key signs no commit after the one that revoked it.
    An epoch counts under one key: the one that signed its epoch_start signs all its commits.
    An epoch begins after all others, and no commit but an epoch_start begins one.
    Under the operator's own key a command answers operators while no syncer serves. It makes no merge.

A commit that breaks one of these is refused by every reader, at the same number. Processes of this program fold what
they are about to write, and so never write one; what a thief of a key has written in the log's next place stays there
until a person removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from diloco_cli.errors import DilocoError
from diloco_cli.layout import Layout
from diloco_cli.protocol.log import commits
from diloco_cli.protocol.log.commits import Commit, EpochStart, Evaluation, Finish, Merge, Quarantine, Skip
from diloco_cli.protocol.log.health import (
    Norms,
    Stability,
    bad_in_a_row,
    is_bad,
    known_before,
    norms_after,
    stability_after,
)
from diloco_cli.protocol.log.keys import commit_key, fingerprint, key_of
from diloco_cli.protocol.log.metrics import Metrics, metrics_after
from diloco_cli.protocol.log.records import (
    FragmentVersion,
    Island,
    MergedOffer,
    Outcome,
    RecordError,
    RunFormat,
    fragment_of_slot,
)
from diloco_cli.signing import NOBODY, OPERATOR, Signature


class LearnerState(StrEnum):
    STARTING = "STARTING"  # it loads the newest committed versions: the first incarnation
    RECOVERING = "RECOVERING"  # likewise, after a failure
    TRAINING = "TRAINING"
    WAITING = "WAITING"  # it pauses: the drift bound, a quarantine, or `at_tau` waits for a merge
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
    CLAIMING = "CLAIMING"  # it takes over, and is a syncer from here on
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
    _B.CLAIMING: frozenset(),
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


OF_SYNCERS = (Merge, Skip, Evaluation, Quarantine, Finish)  # unless an operator asked for it


class AuthorityError(RecordError):
    """A commit is signed by a certified key that may not sign it."""

    code = "authority"

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message, where=where, hint="take its writer's credentials away, then remove that object")


def asked_for(commit: Commit) -> bool:
    """Whether it is the answer to a request that syncers also make by themselves: a quarantine."""
    return isinstance(commit, Quarantine) and commit.request is not None


def contradiction(epoch: int, epoch_key: str, revoked: Mapping[str, int], commit: Commit, by: Signature) -> str | None:
    """Why a commit signed `by` may not come next in a log whose epoch, with its key, is the given one; None if it may.
    Nothing is known of who wrote what in an unsigned run."""
    if by == NOBODY:
        return None
    if by.public in revoked:
        return f"is signed by {by.signer} with a key that commit {revoked[by.public]} revoked"
    if isinstance(commit, EpochStart):
        if commit.epoch <= epoch:
            return f"begins epoch {commit.epoch} after epoch {epoch}"
        return "serves merges under the operator's key" if by.signer == OPERATOR and commit.serves else None
    if commit.epoch != epoch or by.public != epoch_key:
        return f"of epoch {commit.epoch} is signed by {by.signer} with another key than epoch {epoch} began under"
    if by.signer == OPERATOR and isinstance(commit, OF_SYNCERS) and not asked_for(commit):
        return "is signed by the operator, who only answers requests"
    return None


ROLLBACKS_KEPT = 16
Item = TypeVar("Item", bound=MergedOffer | Outcome)


class Applied(Struct, frozen=True, gc=False):
    """The last offer of one learner that a merge applied to one fragment."""

    base: int
    produced: int
    data_end: int
    incarnation: int
    seq: int


class LearnerRecord(Struct, frozen=True):
    """What the log says of a learner. `floor`: offers of older incarnations are refused. Every offer of incarnation
    `floor` with seq < next_seq has an outcome, and so have those in `settled`. `bad_in_a_row`: its bad offers since
    the last one that was merged (health.py); `quarantined`: the commit of its quarantine, None if there is none."""

    floor: int = 0
    next_seq: int = 0
    settled: tuple[int, ...] = ()
    applied: dict[int, Applied] = field(default_factory=dict)
    token_parameters: int = 0
    merges: int = 0
    refused: int = 0
    data_end: int = 0
    step_s: float = 0.0
    bad_in_a_row: int = 0
    quarantined: int | None = None

    def has_outcome(self, seq: int) -> bool:
        return seq < self.next_seq or seq in self.settled


_UNHEARD_OF = LearnerRecord()


class Window(Struct, frozen=True):
    """What the newest merge says of the slots after it. The window of the next slot begins `opens_s` after its commit,
    that of each further slot `slot_s` later; a window closes `grace_s` after it begins, or when all expected learners
    have offered. `slot_s` 0: the pace, and so the windows, are not known yet."""

    opens_s: float
    slot_s: float
    grace_s: float


class RunState(Struct, frozen=True, dict=True):
    """Everything that commits 0..n say. `token_parameters` = sum over applied offers of tokens x parameters of the
    fragment, as an integer, so that no rounding ever enters the token count. Offers whose merge a rollback has undone
    no longer count in it; the counts of merges, skips and offers include them.

    `base_floor`: the newest rollback (0: none); no delta may be based on a version before it. `rollbacks`: the
    newest ones, each as (the commit that it went back to, its own number). `gc_floor`: objects that only commits before
    this one need may be deleted (0: none are). `moments_from`: if later rollbacks undid no merge, the newest rollback
    that did (None: `base_floor` is that one).

    `revoked`: the public keys that commits have revoked, each with its commit. `epoch_key`: the public key under which
    the present epoch counts; empty in an unsigned run (see authority.py).

    `window`: the window of the newest merge, None before the first merge.
    `norms`: what is remembered of the lengths of deltas (health.py).
    `fruitless`: syncers that have begun to serve since the newest merge (or the first versions) without a merge.
    `served`: whether the newest epoch is a syncer's; that of a command ends with the command.
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
    norms: Norms = field(default_factory=dict)
    metrics: Metrics = Metrics()

    def with_members(self, run: RunFormat) -> RunFormat:
        """The run with the islands that have joined it so far."""
        return run.grown(self.members)

    def tokens(self, layout: Layout) -> int:
        """Merged tokens: sum over applied offers of tokens x (parameters of the fragment / all parameters)."""
        return self.token_parameters // layout.num_parameters

    def version(self, fragment: int, version: int) -> FragmentVersion | None:
        """A version that is still known for re-anchoring; None if it is not."""
        return self._versions.get((fragment, version))

    @cached_property
    def _versions(self) -> dict[tuple[int, int], FragmentVersion]:
        return {(output.fragment, output.version): output for output in reversed(self.history)}

    def learner(self, name: str) -> LearnerRecord:
        return self.learners.get(name, _UNHEARD_OF)

    def fastest_step_s(self, num_commits: int) -> float | None:
        """Seconds per step of the fastest learner whose offer was applied in the last `num_commits` commits: a learner
        that has left must not set the pace. None if there is none."""
        newest = [step_s for produced, step_s in self._paces if produced > self.n - num_commits]
        return min(newest, default=None)

    @cached_property
    def _paces(self) -> list[tuple[int, float]]:
        """Of each learner that states its step time: its newest merge and that time, the steps rising with the merges,
        because a slower learner with an older merge sets no pace. (Asked once a commit by each of thousands.)"""
        merged = [
            (max(last.produced for last in known.applied.values()), known.step_s)
            for known in self.learners.values()
            if known.applied and known.step_s > 0
        ]
        kept: list[tuple[int, float]] = []
        for produced, step_s in sorted(merged, key=lambda pace: (-pace[0], pace[1])):
            if not kept or step_s < kept[-1][1]:
                kept.append((produced, step_s))
        return kept

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


def apply(
    state: RunState, commit: commits.Commit, digest: str, layout: Layout, kept_versions: int, by: Signature = NOBODY
) -> RunState:
    """The state after one more commit, signed `by`. Raises RecordError if the record does not continue this log.

    `kept_versions` of each fragment stay known, the newest first, for re-anchoring deltas made from older ones.
    """
    wrong = contradiction(state.epoch, state.epoch_key, state.revoked, commit, by)
    if wrong is not None:
        raise AuthorityError(f"this {commit.kind} {wrong}", commit_key(commit.n))
    phase = _next_phase(state, commit)
    _check_outputs(state, commit, len(layout.fragments))
    state = replace(state, n=commit.n, digest=digest, epoch=commit.epoch, phase=phase, epoch_key=by.public)
    if commit.request is not None:
        state = replace(state, next_request=commit.request + 1)
    state = _folded(_settle_outcomes(state, commit), commit, layout)
    state = _adopt_outputs(state, commit.outputs, kept_versions)
    return replace(
        state,
        norms=norms_after(state.norms, commit, len(layout.fragments)),
        metrics=metrics_after(
            state.metrics, commit, state.tokens(layout), known_before(state.norms, commit, len(layout.fragments))
        ),
        stability=stability_after(state.stability, commit),
    )


def _folded(state: RunState, commit: commits.Commit, layout: Layout) -> RunState:
    """The changes that depend on the commit's kind."""
    match commit:
        case commits.EpochStart():
            fruitless = state.fruitless + (commit.serves and commit.n > 0)
            return replace(state, fruitless=fruitless, served=commit.serves)
        case commits.Merge():
            return _merge(state, commit, layout)
        case commits.Skip():
            return replace(state, slot=state.slot + 1)
        case commits.Membership():
            return replace(state, members=(*state.members, *commit.islands))
        case commits.Quarantine() | commits.Readmit():
            return _keep_out_or_readmit(state, commit)
        case commits.Revoke():
            return _revoke(state, commit)
        case commits.Rollback():
            return _roll_back(state, commit)
        case commits.CollectionFloor():
            return _raise_floor(state, commit)
        case commits.Stop() | commits.Finish() | commits.Refuse() | commits.Evaluation():
            return state
    raise TypeError(f"a {commit.kind} is folded by nothing")


def _next_phase(state: RunState, commit: commits.Commit) -> RunPhase:
    """The run's phase after the commit. Raises RecordError if the commit cannot come next."""
    if (commit.n, commit.previous) != (state.n + 1, state.digest):
        raise RecordError(f"commit {commit.n} does not continue commit {state.n}: the hash chain is broken")
    if commit.epoch < state.epoch:
        raise RecordError(f"commit {commit.n} has epoch {commit.epoch}, older than epoch {state.epoch} before it")
    phase = phase_after(state.phase, commit.kind)
    if phase is None:
        raise RecordError(f"commit {commit.n}, a {commit.kind}, comes after the run was {state.phase}")
    if isinstance(commit, commits.Merge | commits.Skip) and commit.slot != state.slot:
        raise RecordError(f"commit {commit.n} is for slot {commit.slot}, but slot {state.slot} is due")
    return phase


def _check_outputs(state: RunState, commit: commits.Commit, num_fragments: int) -> None:
    if commit.n == 0 and not isinstance(commit, commits.EpochStart):
        raise RecordError(f"the log begins with a {commit.kind}")
    expected: list[int] = []
    if commit.n == 0 or isinstance(commit, commits.Rollback):
        expected = list(range(num_fragments))
    elif isinstance(commit, commits.Merge):
        expected = [fragment_of_slot(state.slot, num_fragments)]
    fragments = [output.fragment for output in commit.outputs]
    if fragments != expected:
        raise RecordError(f"commit {commit.n} brings fragments {fragments} instead of {expected}")


def _settle_outcomes(state: RunState, commit: commits.Commit) -> RunState:
    if not commit.inputs and not commit.outcomes:
        return state
    settled: list[MergedOffer | Outcome] = [*commit.inputs, *commit.outcomes]
    if not all(state.counts(item.incarnation) for item in commit.inputs):
        raise RecordError(f"commit {commit.n} merges an offer under a key that was revoked before")
    offers, refused = _by_learner(settled), _by_learner(commit.outcomes)
    learners = dict(state.learners)
    for name in sorted(offers):
        mine, outcomes = offers[name], refused.get(name, ())
        counting = [item for item in mine if state.counts(item.incarnation)]  # what a revoked key offered has no place
        known = learners.get(name, _UNHEARD_OF)
        known = _settle(known, counting) if counting else known
        if outcomes or known.bad_in_a_row:
            bad = bad_in_a_row(
                known.bad_in_a_row, len(mine) - len(outcomes), sum(is_bad(outcome.reason) for outcome in outcomes)
            )
            known = replace(known, refused=known.refused + len(outcomes), bad_in_a_row=bad)
        learners[name] = known
    return replace(state, learners=learners)


def _by_learner(items: Iterable[Item]) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.learner, []).append(item)
    return found


def _settle(known: LearnerRecord, offers: Sequence[MergedOffer | Outcome]) -> LearnerRecord:
    """The first outcome of any offer of a newer incarnation raises the floor."""
    first = offers[0]
    if len(offers) == 1 and first.seq == known.next_seq and first.incarnation == known.floor and not known.settled:
        return replace(known, next_seq=known.next_seq + 1)  # the usual case, and thousands of them
    floor = max(offer.incarnation for offer in offers)
    if floor > known.floor:
        known = replace(known, floor=floor, next_seq=0, settled=())
    settled = set(known.settled) | {offer.seq for offer in offers if offer.incarnation == known.floor}
    next_seq = known.next_seq
    while next_seq in settled:
        next_seq += 1
    return replace(known, next_seq=next_seq, settled=tuple(sorted(seq for seq in settled if seq > next_seq)))


def _merge(state: RunState, commit: commits.Merge, layout: Layout) -> RunState:
    output = commit.outputs[0]
    parameters = layout.fragments[output.fragment].num_parameters
    learners = dict(state.learners)
    for item in commit.inputs:
        known = learners[item.learner]
        now = Applied(item.base, output.version, item.data_end, item.incarnation, item.seq)
        applied = {**known.applied, output.fragment: now}
        learners[item.learner] = replace(
            known,
            applied=applied,
            token_parameters=known.token_parameters + item.tokens * parameters,
            step_s=item.step_s,
            merges=known.merges + 1,
            data_end=max(known.data_end, item.data_end),
        )
    return replace(
        state,
        slot=state.slot + 1,
        learners=learners,
        token_parameters=state.token_parameters + commit.merged_tokens * parameters,
        merges=state.merges + 1,
        fruitless=0,
        window=Window(commit.opens_s, commit.slot_s, commit.grace_s),
    )


def _keep_out_or_readmit(state: RunState, commit: commits.Quarantine | commits.Readmit) -> RunState:
    known, keeps_out = state.learner(commit.learner), isinstance(commit, commits.Quarantine)
    if (known.quarantined is None) != keeps_out:
        raise RecordError(f"commit {commit.n}, a {commit.kind} of {commit.learner!a}, does not fit what was before it")
    changed = replace(known, bad_in_a_row=0, quarantined=commit.n if keeps_out else None)
    return replace(state, learners={**state.learners, commit.learner: changed})


def _revoke(state: RunState, commit: commits.Revoke) -> RunState:
    return replace(state, revoked={commit.key: commit.n} | state.revoked)


def _roll_back(state: RunState, commit: commits.Rollback) -> RunState:
    """Tokens and shares become those of commit `to`; the other counts stay, and data positions do not go back."""
    if not state.gc_floor <= commit.to < commit.n:
        raise RecordError(f"commit {commit.n} goes back to commit {commit.to}, which is not there")
    shares = dict(commit.shares)
    anew = commit.to == commit.n - 1  # it undoes no merge
    return replace(
        state,
        base_floor=commit.n,
        token_parameters=sum(shares.values()),
        learners={n: replace(k, token_parameters=shares.get(n, 0)) for n, k in state.learners.items()},
        history=(),
        moments_from=state.moments_floor if anew else None,
        rollbacks=(*state.rollbacks, (commit.to, commit.n))[-ROLLBACKS_KEPT:],
    )


def _raise_floor(state: RunState, commit: commits.CollectionFloor) -> RunState:
    if not state.gc_floor < commit.floor < commit.n:
        raise RecordError(f"commit {commit.n} has the floor {commit.floor}, after {state.gc_floor}")
    return replace(state, gc_floor=commit.floor)


def _adopt_outputs(state: RunState, outputs: Iterable[FragmentVersion], kept: int) -> RunState:
    current = {output.fragment: output for output in state.outputs}
    history = list(state.history)
    for output in outputs:
        current[output.fragment] = output
        versions = [o for o in history if o.fragment == output.fragment]
        for old in versions[: max(0, len(versions) - kept + 1)]:
            history.remove(old)
        history.append(output)
    ordered = tuple(current[fragment] for fragment in sorted(current))
    return replace(state, outputs=ordered, history=tuple(history))
