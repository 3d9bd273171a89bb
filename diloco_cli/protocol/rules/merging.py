"""Which offers may enter a merge, what each delta weighs, and how far it is scaled down; which learners are kept out.

A refusal is one of the words in REASONS (protocol/log/health.py). Weights: arXiv 2604.21428, quantity x quality.

Norm clipping: a delta longer than `sync.clip` times what is usual is scaled down to what is usual: the median of the
slot's other deltas, where these are at least two, or of the norms that were merged before, over learners; the lesser of
both counts, for the steps that are believed of the delta (log/health.py, rules/belief.py). So while most learners
are honest, no delta moves the parameters by more than `clip` times an honest one. Published as norm clipping of
gradients (Pascanu et al. 2013, arXiv 1211.5063) and norm bounding of federated updates (Sun et al. 2019, arXiv
1911.07963), which scale down to the bound itself; here a delta beyond the bound is no honest one.

A delta that the slot's others exceed by the same factor weighs less in proportion: it would take its share of the
weight and bring nothing.

The others are measured for the steps that they state: beside few steps that are believed of a long delta, all others
would look short, and a hostile one could be as long as that delta would be for as many steps.

Clipping bounds lengths alone. A delta of usual length in a wrong direction is merged with its weight; the log states
each delta's cosine to the others, and the held-out loss shows the harm (rules/divergence.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diloco_cli.config.settings import SyncSettings
from diloco_cli.digests import is_digest
from diloco_cli.protocol.log.health import Known, are_too_many, least_norms, usual_norms
from diloco_cli.protocol.log.keys import max_fragment_bytes
from diloco_cli.protocol.log.records import (
    MAX_EXACT,
    SCHEMA,
    FragmentVersion,
    Island,
    Offer,
    RunFormat,
    fragment_of_slot,
)
from diloco_cli.protocol.log.state import LearnerRecord, RunState

MAX_S = 1e6  # the longest time that an honest learner can state in its timings


def is_well_formed(offer: Offer) -> bool:
    """Whether an honest learner can have written this. Checked first: any process with credentials may write offers."""
    numbers = (offer.slot, offer.fragment, offer.base, offer.data_start, offer.data_end, offer.tokens, offer.steps)
    timings = (offer.timings.step_s, offer.timings.slot_s, offer.timings.upload_s, offer.timings.adoption_s)
    return (
        offer.schema <= SCHEMA
        and all(0 <= number < MAX_EXACT for number in (*numbers, offer.payload_bytes))
        and all(0 <= seconds <= MAX_S for seconds in timings)
        and is_digest(offer.payload_digest)
    )


def has_possible_size(offer: Offer, run: RunFormat) -> bool:
    """Whether a payload of the stated size can belong to the offer's fragment. Larger payloads are not read."""
    return 0 <= offer.payload_bytes <= max_fragment_bytes(run.layout, offer.fragment)


def refusal(offer: Offer, state: RunState, run: RunFormat) -> str | None:
    """The reason why `offer` can never be applied at this head, or None if it is eligible."""
    return Eligibility(state, run).refusal(offer)


class Eligibility:
    """Judges offers at one head. What does not depend on the offer is computed once, as there may be thousands."""

    def __init__(self, state: RunState, run: RunFormat) -> None:
        self._state, self._run = state, state.with_members(run)
        self._max_ahead, self._max_steps = max_ahead(self._run), max_steps(self._run)

    def refusal(self, offer: Offer) -> str | None:
        """As the function of this name."""
        state = self._state
        known, island = state.learner(offer.learner), self._run.island(offer.learner)
        if island is None:
            return "unknown_learner"
        if not state.counts(offer.incarnation):
            return "key_revoked"
        if offer.incarnation < known.floor:
            return "old_incarnation"
        if offer.incarnation == known.floor and known.has_outcome(offer.seq):
            return "settled"
        if known.quarantined is not None:
            return "quarantined"
        if not self._claims_are_possible(offer, island):
            return "bad_claim"
        if offer.slot < state.slot or offer.payload_bytes == 0:  # no payload: its learner knew that the slot had passed
            return "late"
        if offer.slot - state.slot > self._max_ahead:
            return "too_early"
        if offer.steps == 0 or offer.tokens == 0:
            return "no_weight"
        if offer.base < state.base_floor:
            return "before_rollback"
        return self._base_refusal(offer) or _consumed(offer, known)

    def _base_refusal(self, offer: Offer) -> str | None:
        base = self._state.version(offer.fragment, offer.base)
        if base is None:
            return "unknown_base"
        if base.weights_digest != offer.base_digest:
            return "wrong_base"
        stale = self._state.slot - base.slot > self._max_ahead
        return "unknown_base" if stale and base not in self._state.outputs else None  # a current one is never stale

    def _claims_are_possible(self, offer: Offer, island: Island) -> bool:
        return (
            0 <= offer.fragment < self._run.num_fragments
            and offer.slot >= 0
            and fragment_of_slot(offer.slot, self._run.num_fragments) == offer.fragment
            and 0 <= offer.steps <= self._max_steps
            and 0 <= offer.data_start <= offer.data_end
            and offer.tokens == offer.data_end - offer.data_start
            and offer.tokens <= offer.steps * island.batch_tokens
            and has_possible_size(offer, self._run)
        )


def _consumed(offer: Offer, known: LearnerRecord) -> str | None:
    last = known.applied.get(offer.fragment)
    if last is not None and offer.base < last.produced:
        return "base_consumed"
    return "data_overlap" if last is not None and offer.data_start < last.data_end else None


def is_stale(base: FragmentVersion, slot: int, run: RunFormat) -> bool:
    """Whether a version, if it is not its fragment's newest, is too old for a delta from it to merge in this slot."""
    return slot - base.slot > max_ahead(run)


def max_ahead(run: RunFormat) -> int:
    """How many slots an offer may name beyond the head, and how many slots old its base may be. If the run goes on, the
    base of an offer that names a slot further ahead is too old when that slot is due."""
    return (run.settings.sync.staleness_rounds + 1) * run.num_fragments


def max_steps(run: RunFormat) -> int:
    """The most inner steps that an offer can hold: the drift bound limits the steps, staleness the age of the base."""
    return max_rounds(run.settings.sync) * max(run.settings.sync.every, run.most_local_steps)


def max_rounds(sync: SyncSettings) -> int:
    """How many rounds of progress an offer can hold."""
    return sync.drift_rounds + sync.staleness_rounds + 2


def offered_weight(run: RunFormat, learner: str, tokens: int, steps: int, believed: int) -> float:
    """What a delta's tokens weigh, as far as they are believed. An island that has joined states its batch itself, and
    a batch weighs by its square: so it counts for no more than the largest of the launch."""
    share = min(1.0, believed / tokens) if tokens else 0.0
    if learner not in run.launched:
        tokens = min(tokens, steps * run.largest_batch_tokens)
    return token_weight(tokens, steps) * share


def due_for_quarantine(state: RunState, run: RunFormat) -> tuple[str, str] | None:
    """The first learner by name that has made too many bad offers in a row, with the reason; None if there is none, and
    for one that the run needs: its bad offers are refused in any case."""
    bad = {name: known.bad_in_a_row for name, known in state.learners.items() if are_too_many(known.bad_in_a_row)}
    due = (name for name in sorted(bad) if not why_not_quarantined(name, state, run))
    return next(((name, f"{bad[name]} offers in a row that no honest learner makes") for name in due), None)


def why_not_quarantined(name: str, state: RunState, run: RunFormat) -> str:
    """Why a learner cannot be kept out; "" if it can. The run must not stop for want of a quorum."""
    names = {island.name for island in state.with_members(run).all_islands}
    if name not in names:
        return f"{name!a} is no learner of this run"
    if state.learner(name).quarantined is not None:
        return f"{name!a} is quarantined already"
    left = sum(state.learner(one).quarantined is None for one in names) - 1
    if left < run.settings.sync.quorum:
        return f"without {name} {left} learners would be left, and the quorum is {run.settings.sync.quorum}"
    return ""


def token_weight(tokens: int, steps: int) -> float:
    """tokens * (tokens / steps): >= 0, finite for whatever an offer may claim.

    Equal speed and batch give equal weights; an island that lost half its batch at equal steps weighs a quarter. With
    equal batches the weight goes with the steps, so an island half as fast (H_i = H / 2) weighs half.

    No steps or no tokens give the weight 0, never a division by 0. Such an offer is refused (`no_weight`) before it
    counts as present, so no merge has only weights of 0. A slot for which only such offers come has no quorum; it
    waits, with that reason, or is skipped.
    """
    if steps <= 0 or tokens <= 0:
        return 0.0
    return tokens * tokens / steps


LEAST = 1 / 64  # of its weight, which even a delta of zeros keeps: weights are relative, and something must be merged


@dataclass(frozen=True)
class JudgedDelta:
    """A delta as the log states it, with the `steps` and the `weight` that are believed of it. `stated`: its steps."""

    learner: str
    steps: int
    stated: int
    norm: float
    weight: float


@dataclass(frozen=True)
class DeltaShare:
    """The delta is multiplied by `scale` and weighs `weight`. `reason`: why it is clipped; "" if it is not."""

    scale: float
    weight: float
    reason: str = ""


def judge(known: Known, deltas: Sequence[JudgedDelta], clip: float | Literal["none"]) -> list[DeltaShare]:
    """The verdicts on a slot's deltas, in their order. `known`: the fragment's memory as of the commit before. Exact,
    from logged figures alone."""
    stated = [(delta.norm, delta.stated) for delta in deltas]
    usual = usual_norms(known, stated, [delta.steps for delta in deltas])
    verdicts = []
    for delta, longer, shorter in zip(deltas, usual, least_norms(stated), strict=True):
        weight = delta.weight
        if clip == "none":
            verdicts.append(DeltaShare(1.0, weight))
        elif longer and delta.norm > clip * longer:
            times = f"{delta.learner}'s delta is {delta.norm / longer:.3g} times as long as usual"
            verdicts.append(DeltaShare(longer / delta.norm, weight, f"{times}: clipped to that"))
        else:
            full = clip * delta.norm >= shorter
            verdicts.append(DeltaShare(1.0, weight if full else weight * max(LEAST, clip * delta.norm / shorter)))
    return verdicts
