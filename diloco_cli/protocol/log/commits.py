"""The kinds of commits. Each kind is one class with all its facts: its fields, how it changes the folded state, its
figures and its words for people. `apply` folds the next commit: all readers of the same commits have the same state.

A decision makes a commit with the fields of its kind; the process that serves the log adds epoch, nonce, time and
software, and `append` (commit_log.py) `n` and `previous`. `kind` tells the types apart in the bucket.

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

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from diloco_cli.layout import Layout
from diloco_cli.protocol.log.health import (
    GOOD_KEPT,
    NOTHING,
    Evaluated,
    Known,
    Norms,
    Stability,
    bad_in_a_row,
    is_bad,
    norms_of_merge,
    times_usual,
)
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.metrics import (
    MAX_LOSSES,
    RECENT_MERGES,
    RECENT_NOTES,
    LastDelta,
    MergeNote,
    Metrics,
    Sustained,
    noted,
    thinned,
)
from diloco_cli.protocol.log.records import (
    SCHEMA,
    FragmentVersion,
    Island,
    MergedOffer,
    Outcome,
    RecordError,
    fragment_of_slot,
)
from diloco_cli.protocol.log.state import Applied, RunPhase, RunState, Window, phase_after
from diloco_cli.signing import NOBODY, OPERATOR, Signature, short_key

ROLLBACKS_KEPT = 16
Item = TypeVar("Item", bound=MergedOffer | Outcome)


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every commit says. `previous` is the digest of the record before: the log is a hash chain.

    `request`: the newest request that this commit answers. `outcomes`: those of offers that no merge used. `nonce`: by
    it a process recognises its own write.
    """

    n: int = -1
    epoch: int = 0
    nonce: str = ""
    previous: str = ""
    time: str = ""
    software: str = ""
    reason: str = ""
    request: int | None = None
    outcomes: tuple[Outcome, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if type(self) is Commit:
            raise TypeError("a commit is of one of the kinds below")

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def inputs(self) -> tuple[MergedOffer, ...]:
        """The offers that a merge applied; there are none in other commits."""
        return ()

    @property
    def outputs(self) -> tuple[FragmentVersion, ...]:
        """The versions that this commit brings into the log."""
        return ()

    def fragments_due(self, slot: int, num_fragments: int) -> list[int]:
        """The fragments of which it must bring versions, while `slot` is due."""
        return list(range(num_fragments)) if self.n == 0 else []

    @property
    def is_syncers(self) -> bool:
        """Whether only a syncer that serves makes it: no command under the operator's key."""
        return False

    def folded(self, state: RunState, layout: Layout) -> RunState:
        """The state with what this kind changes in it. Raises RecordError where it does not fit what was before."""
        return state

    def norms_after(self, norms: Norms, num_fragments: int) -> Norms:
        return norms

    def stability_after(self, known: Stability) -> Stability:
        return known

    def counted(self, metrics: Metrics, tokens: int, known: Known) -> Metrics:
        """The metrics with the figures of this kind; see `metrics_after`."""
        return metrics

    def told(self) -> list[tuple[str, str]]:
        """(unit, text) of what people should know."""
        return []


class EpochStart(Commit, tag="epoch_start", frozen=True, kw_only=True):
    """A syncer begins to serve. Commit 0 brings version 0 of every fragment, and names FORMAT.json by its digest.
    `serves`: False for an epoch that a command claims, which answers operators and merges nothing."""

    outputs: tuple[FragmentVersion, ...] = ()
    serves: bool = True
    format: str = ""

    @property
    def is_syncers(self) -> bool:
        return self.serves

    def folded(self, state: RunState, layout: Layout) -> RunState:
        fruitless = state.fruitless + (self.serves and self.n > 0)
        return replace(state, fruitless=fruitless, served=self.serves, format=state.format if self.n else self.format)

    def stability_after(self, known: Stability) -> Stability:
        """Who resumes a run that paused accepts the loss as it is, which nothing before it is compared with, or has
        gone back."""
        if not (self.serves and known.paused):
            return known
        return Stability(good=known.good if known.jump is None else (), since=known.since)

    def counted(self, metrics: Metrics, tokens: int, known: Known) -> Metrics:
        return metrics.begun(self.time)

    def told(self) -> list[tuple[str, str]]:
        return [("syncer", f"epoch {self.epoch} starts: {self.reason}")]


class Merge(Commit, tag="merge", frozen=True, kw_only=True):
    """One slot's offers, at least one, became a version of its fragment, the only output.

    `grace_s`: how long this merge could wait after its quorum, of which it waited `grace_used_s`; the window of the
    next slot begins `opens_s` after this commit, that of each further one `slot_s` later.
    """

    slot: int
    inputs: tuple[MergedOffer, ...]
    outputs: tuple[FragmentVersion]
    tokens: int = 0
    quorum: int = 0
    alive: int = 0
    grace_s: float = 0.0
    grace_used_s: float = 0.0
    opens_s: float = 0.0
    slot_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("a merge has at least one input")

    @property
    def merged_tokens(self) -> int:
        """What is believed of all inputs."""
        return sum(item.counted for item in self.inputs)

    def fragments_due(self, slot: int, num_fragments: int) -> list[int]:
        return [fragment_of_slot(slot, num_fragments)]

    @property
    def is_syncers(self) -> bool:
        return True

    def folded(self, state: RunState, layout: Layout) -> RunState:
        output = self.outputs[0]
        parameters = layout.fragments[output.fragment].num_parameters
        learners = dict(state.learners)
        for item in self.inputs:
            known = learners[item.learner]
            now = Applied(item.base, output.version, item.data_end, item.incarnation, item.seq)
            learners[item.learner] = replace(
                known,
                applied={**known.applied, output.fragment: now},
                token_parameters=known.token_parameters + item.counted * parameters,
                doubted=max(0, known.doubted + (item.tokens - item.counted) * parameters),
                proven=item.proven,
                merges=known.merges + 1,
                data_end=max(known.data_end, item.data_end),
            )
        return replace(
            state,
            slot=state.slot + 1,
            learners=learners,
            token_parameters=state.token_parameters + self.merged_tokens * parameters,
            merges=state.merges + 1,
            fruitless=0,
            window=Window(self.opens_s, self.slot_s, self.grace_s),
        )

    def norms_after(self, norms: Norms, num_fragments: int) -> Norms:
        fragment = fragment_of_slot(self.slot, num_fragments)
        return {**norms, fragment: norms_of_merge(norms.get(fragment, NOTHING), self.inputs)}

    def stability_after(self, known: Stability) -> Stability:
        return replace(known, since=known.since + 1)

    def counted(self, metrics: Metrics, tokens: int, known: Known) -> Metrics:
        alive = max(self.alive, len(self.inputs))
        participants = tuple(sorted(item.learner for item in self.inputs))
        note = MergeNote(
            self.n, self.slot, self.time, participants, self.alive, self.quorum, self.grace_s, self.grace_used_s, tokens
        )
        deltas = {
            item.learner: LastDelta(round(times, 2), round(item.cosine, 2))
            for item, times in zip(self.inputs, times_usual(known, self.inputs), strict=True)
        }
        return replace(
            metrics,
            participation_sum=metrics.participation_sum + len(self.inputs) / alive,
            recent_merges=(*metrics.recent_merges, note)[-RECENT_MERGES:],
            deltas=metrics.deltas | deltas,
            sustained=metrics.sustained.merged(self.time, sum(item.own_counted for item in self.inputs), alive),
        )


class Skip(Commit, tag="skip", frozen=True, kw_only=True):
    """A slot passed without a merge."""

    slot: int

    @property
    def is_syncers(self) -> bool:
        return True

    def folded(self, state: RunState, layout: Layout) -> RunState:
        return replace(state, slot=state.slot + 1)

    def stability_after(self, known: Stability) -> Stability:
        return replace(known, since=known.since + 1)

    def counted(self, metrics: Metrics, tokens: int, known: Known) -> Metrics:
        return replace(metrics, skips=metrics.skips + 1)

    def told(self) -> list[tuple[str, str]]:
        return [("syncer", self.reason)]


class Refuse(Commit, tag="refuse", frozen=True, kw_only=True):
    """Offers that no merge can use (`outcomes`), or a request that is not carried out (`reason` says why)."""

    def told(self) -> list[tuple[str, str]]:
        return [("syncer", self.reason)] if self.reason else []


class Membership(Commit, tag="membership", frozen=True, kw_only=True):
    """Islands have joined, at least one, in the order in which they get their data shards."""

    islands: tuple[Island, ...]

    def __post_init__(self) -> None:
        if not self.islands:
            raise ValueError("a membership commit admits at least one island")

    def folded(self, state: RunState, layout: Layout) -> RunState:
        return replace(state, members=(*state.members, *self.islands))

    def told(self) -> list[tuple[str, str]]:
        return [(island.name, f"joins in {island.region}") for island in self.islands]


class Evaluation(Commit, tag="eval", frozen=True, kw_only=True):
    """The held-out loss, in nats per token, of the versions as of commit `evaluated`, when `tokens` were merged. None:
    the model gives no finite loss. `jumped`: it is beyond the bound that the run states; the reason says by what."""

    evaluated: int
    loss: float | None
    tokens: int
    jumped: bool = False

    @property
    def is_syncers(self) -> bool:
        return True

    def stability_after(self, known: Stability) -> Stability:
        at = Evaluated(self.evaluated, self.loss, self.tokens)
        if self.jumped:
            return replace(known, since=0, jump=at)
        waits = known.recovers_beyond is not None and self.tokens <= known.recovers_beyond
        return replace(
            known,
            since=0,
            good=(*known.good, at)[-GOOD_KEPT:],
            jump=None,
            recovers_beyond=known.recovers_beyond if waits else None,
        )

    def counted(self, metrics: Metrics, tokens: int, known: Known) -> Metrics:
        if self.loss is None:
            return metrics
        losses = (*metrics.losses, (self.tokens, self.loss))
        return replace(metrics, losses=tuple(thinned(losses, MAX_LOSSES, lambda point: point[0])))

    def told(self) -> list[tuple[str, str]]:
        return [("syncer", self.reason)] if self.reason else []


class Quarantine(Commit, tag="quarantine", frozen=True, kw_only=True):
    """A learner is kept out: for its bad offers, or because an operator asks for it (`request`)."""

    learner: str

    @property
    def is_syncers(self) -> bool:
        return self.request is None

    def folded(self, state: RunState, layout: Layout) -> RunState:
        return _kept_out(state, self, self.learner, self.n)

    def norms_after(self, norms: Norms, num_fragments: int) -> Norms:
        return _without(norms, self.learner)

    def told(self) -> list[tuple[str, str]]:
        return [(self.learner, f"quarantined: {self.reason}")]


class Readmit(Commit, tag="readmit", frozen=True, kw_only=True):
    """A quarantined learner may take part again."""

    learner: str

    def folded(self, state: RunState, layout: Layout) -> RunState:
        return _kept_out(state, self, self.learner, None)

    def norms_after(self, norms: Norms, num_fragments: int) -> Norms:
        return _without(norms, self.learner)

    def told(self) -> list[tuple[str, str]]:
        return [(self.learner, f"readmitted: {self.reason}")]


def _kept_out(state: RunState, commit: Commit, learner: str, since: int | None) -> RunState:
    known = state.learner(learner)
    if (known.quarantined is None) == (since is None):
        raise RecordError(f"commit {commit.n}, a {commit.kind} of {learner!a}, does not fit what was before it")
    return replace(state, learners={**state.learners, learner: replace(known, bad_in_a_row=0, quarantined=since)})


def _without(norms: Norms, learner: str) -> Norms:
    return {of: {name: one for name, one in known.items() if name != learner} for of, known in norms.items()}


class Revoke(Commit, tag="revoke", frozen=True, kw_only=True):
    """The public key `key` (of `learner`, if it was a learner's) counts for nothing that is judged after this commit.
    What merges have used stays; offers that the syncer has read are refused (`key_revoked`), and nothing else below its
    fingerprint is read any more. Whoever holds the key ends with 8 once it hears of this (ARCHITECTURE.md, Keys)."""

    key: str
    learner: str | None = None

    def folded(self, state: RunState, layout: Layout) -> RunState:
        return replace(state, revoked={self.key: self.n} | state.revoked)

    def told(self) -> list[tuple[str, str]]:
        return [("syncer", f"revoked the key {short_key(self.key)}: {self.reason}")]


class Rollback(Commit, tag="rollback", frozen=True, kw_only=True):
    """Every fragment is again what it was after commit `to`. `shares`, sorted: (learner, tokens x parameters of it that
    still count), as of commit `to`; a learner that is not named has none that count. `evaluated`: the syncer goes back
    because the loss of that commit had jumped."""

    to: int
    outputs: tuple[FragmentVersion, ...]
    shares: tuple[tuple[str, int], ...] = ()
    evaluated: int | None = None

    def fragments_due(self, slot: int, num_fragments: int) -> list[int]:
        return list(range(num_fragments))

    def folded(self, state: RunState, layout: Layout) -> RunState:
        """Tokens and shares become those of commit `to`; the other counts stay, and data positions do not go back."""
        if not state.gc_floor <= self.to < self.n:
            raise RecordError(f"commit {self.n} goes back to commit {self.to}, which is not there")
        shares = dict(self.shares)
        anew = self.to == self.n - 1  # it undoes no merge
        return replace(
            state,
            base_floor=self.n,
            token_parameters=sum(shares.values()),
            learners={n: replace(k, token_parameters=shares.get(n, 0), doubted=0) for n, k in state.learners.items()},
            history=(),
            moments_from=state.moments_floor if anew else None,
            rollbacks=(*state.rollbacks, (self.to, self.n))[-ROLLBACKS_KEPT:],
        )

    def stability_after(self, known: Stability) -> Stability:
        """Evaluations of undone merges no longer count."""
        answers = known.jump is not None and self.evaluated is not None
        recovers_beyond = known.jump.tokens if known.jump is not None and answers else known.recovers_beyond
        good = tuple(at for at in known.good if at.n <= self.to)
        return replace(known, good=good, jump=None, recovers_beyond=recovers_beyond)

    def counted(self, metrics: Metrics, tokens: int, known: Known) -> Metrics:
        losses = tuple(point for point in metrics.losses if point[0] <= tokens)
        return replace(metrics, losses=losses, recent_merges=(), sustained=Sustained(bests=metrics.sustained.bests))

    def told(self) -> list[tuple[str, str]]:
        return [("syncer", f"rolled back to commit {self.to}: {self.reason}")]


class CollectionFloor(Commit, tag="gc_floor", frozen=True, kw_only=True):
    """Objects that only commits before number `floor` need may be deleted."""

    floor: int

    def folded(self, state: RunState, layout: Layout) -> RunState:
        if not state.gc_floor < self.floor < self.n:
            raise RecordError(f"commit {self.n} has the floor {self.floor}, after {state.gc_floor}")
        return replace(state, gc_floor=self.floor)

    def told(self) -> list[tuple[str, str]]:
        return [("syncer", self.reason)]


class Stop(Commit, tag="stop", frozen=True, kw_only=True):
    """The run pauses until a later `epoch_start` resumes it. `diverged`: the syncer itself stopped it, as people must
    look at a loss that has jumped."""

    diverged: bool = False

    def stability_after(self, known: Stability) -> Stability:
        return replace(known, paused=True) if self.diverged else known

    def counted(self, metrics: Metrics, tokens: int, known: Known) -> Metrics:
        return replace(metrics, sustained=Sustained(bests=metrics.sustained.bests), stopped_at=self.time)

    def told(self) -> list[tuple[str, str]]:
        return [("syncer", f"stopped: {self.reason}")]


class Finish(Commit, tag="finish", frozen=True, kw_only=True):
    """The run has merged the tokens that it was to train on."""

    @property
    def is_syncers(self) -> bool:
        return True

    def told(self) -> list[tuple[str, str]]:
        return [("syncer", self.reason)]


class AuthorityError(RecordError):
    """A commit is signed by a certified key that may not sign it."""

    code = "authority"

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message, where=where, hint="take its writer's credentials away, then remove that object")


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
    elif commit.epoch != epoch or by.public != epoch_key:
        return f"of epoch {commit.epoch} is signed by {by.signer} with another key than epoch {epoch} began under"
    if by.signer == OPERATOR and commit.is_syncers:
        return "is signed by the operator, who only answers requests"
    return None


def apply(
    state: RunState, commit: Commit, digest: str, layout: Layout, kept_versions: int, by: Signature = NOBODY
) -> RunState:
    """The state after one more commit, signed `by`: a pure function, and the only way to change the state. Raises
    RecordError if the record does not continue this log.

    `kept_versions` of each fragment stay known, the newest first, for re-anchoring deltas made from older ones.
    """
    wrong = contradiction(state.epoch, state.epoch_key, state.revoked, commit, by)
    if wrong is not None:
        raise AuthorityError(f"this {commit.kind} {wrong}", commit_key(commit.n))
    phase, num_fragments = _next_phase(state, commit), len(layout.fragments)
    fragments, due = [output.fragment for output in commit.outputs], commit.fragments_due(state.slot, num_fragments)
    if fragments != due:
        raise RecordError(f"commit {commit.n} brings fragments {fragments} instead of {due}")
    known = state.norms.get(fragment_of_slot(state.slot, num_fragments), NOTHING)
    state = replace(
        state,
        n=commit.n,
        digest=digest,
        epoch=commit.epoch,
        phase=phase,
        epoch_key=by.public,
        next_request=state.next_request if commit.request is None else commit.request + 1,
    )
    state = commit.folded(_settle_outcomes(state, commit), layout)
    state = _adopt_outputs(state, commit.outputs, kept_versions)
    return replace(
        state,
        norms=commit.norms_after(state.norms, num_fragments),
        metrics=metrics_after(state.metrics, commit, state.tokens(layout), known),
        stability=commit.stability_after(state.stability),
    )


def metrics_after(metrics: Metrics, commit: Commit, tokens: int, known: Known = NOTHING) -> Metrics:
    """The metrics after one more commit. `tokens`: the merged tokens after it; `known`: of a merge, what was remembered
    of its fragment's lengths before it."""
    return commit.counted(
        replace(
            metrics,
            updated_at=commit.time,
            started_at=metrics.started_at or commit.time,
            offers_applied=metrics.offers_applied + len(commit.inputs),
            offers_refused=metrics.offers_refused + len(commit.outcomes),
            notes=noted(metrics.notes, commit.time, commit.kind, commit.told(), commit.outcomes)[-RECENT_NOTES:],
        ),
        tokens,
        known,
    )


def _next_phase(state: RunState, commit: Commit) -> RunPhase:
    """The run's phase after the commit. Raises RecordError if the commit cannot come next."""
    if (commit.n, commit.previous) != (state.n + 1, state.digest):
        raise RecordError(f"commit {commit.n} does not continue commit {state.n}: the hash chain is broken")
    if commit.n == 0 and not isinstance(commit, EpochStart):
        raise RecordError(f"the log begins with a {commit.kind}")
    if commit.epoch < state.epoch:
        raise RecordError(f"commit {commit.n} has epoch {commit.epoch}, older than epoch {state.epoch} before it")
    phase = phase_after(state.phase, commit.kind)
    if phase is None:
        raise RecordError(f"commit {commit.n}, a {commit.kind}, comes after the run was {state.phase}")
    if isinstance(commit, Merge | Skip) and commit.slot != state.slot:
        raise RecordError(f"commit {commit.n} is for slot {commit.slot}, but slot {state.slot} is due")
    return phase


def _settle_outcomes(state: RunState, commit: Commit) -> RunState:
    if not commit.inputs and not commit.outcomes:
        return state
    if not all(state.counts(item.incarnation) for item in commit.inputs):
        raise RecordError(f"commit {commit.n} merges an offer under a key that was revoked before")
    merged, refused = _by_learner(commit.inputs), _by_learner(commit.outcomes)
    learners = dict(state.learners)
    for name in sorted({*merged, *refused}):
        outcomes = refused.get(name, [])
        offers: list[MergedOffer | Outcome] = [*merged.get(name, []), *outcomes]
        counting = [item for item in offers if state.counts(item.incarnation)]  # a revoked key's have no place
        known = state.learner(name)
        known = known.settling(counting) if counting else known
        if outcomes or known.bad_in_a_row:
            bad = sum(is_bad(outcome.reason) for outcome in outcomes)
            known = replace(
                known,
                refused=known.refused + len(outcomes),
                bad_in_a_row=bad_in_a_row(known.bad_in_a_row, len(merged.get(name, [])), bad),
            )
        learners[name] = known
    return replace(state, learners=learners)


def _by_learner(items: Iterable[Item]) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.learner, []).append(item)
    return found


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
