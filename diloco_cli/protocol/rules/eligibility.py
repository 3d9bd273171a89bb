"""Whether an offer may enter a merge: the checks that need no payload. A refusal is one of the words in REASONS."""

from __future__ import annotations

from diloco_cli.digests import is_digest
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
from diloco_cli.protocol.rules.merging import token_weight

MAX_S = 1e6  # the longest time that an honest learner can state in its timings
REASONS: dict[str, str] = {
    "unknown_learner": "neither the run's format nor its log names such a learner",
    "old_incarnation": "a newer incarnation of this learner has been merged",
    "settled": "this offer already has an outcome",
    "late": "it came when its slot had been merged, or skipped",
    "too_early": "it names a slot so far ahead that its base would be too old by then",
    "bad_claim": "slot, fragment, tokens, steps or data range contradict each other, or no payload is so large",
    "quarantined": "its learner is quarantined, until an operator readmits it (diloco readmit)",
    "wrong_base": "it names other bytes as its base than the log does",
    "before_rollback": "its base lies behind a rollback",
    "unknown_base": "the base version is not in the log, or lies further back than the staleness limit",
    "base_consumed": "an offer from this base, or from before the merge that used it, was already applied",
    "data_overlap": "its data range overlaps what was already applied to this fragment",
    "superseded": "a newer offer of the same learner and fragment took its place",
    "missing_payload": "its payload is not in the bucket",
    "wrong_size": "its payload has another size than the offer says",
    "digest_mismatch": "its payload has other bytes than the offer says",
    "bad_payload": "its payload's header is not the one that the layout gives: other names, shapes, types",
    "non_finite": "its payload holds values that are not finite",
    "bad_norms": "the norms that it claims are not those of its values",
    "norm_cap": "its norm is far above what this fragment has seen lately",
    "no_weight": "it brings no steps",
    "bad_signature": "the offer is damaged: its learner has published the next one",
    "bad_record": "the offer itself is not well formed",
    "run_over": "the run ended",
}


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
    sync = run.settings.sync
    longest = max(sync.every, run.most_local_steps)
    return (sync.drift_rounds + sync.staleness_rounds + 2) * longest


def round_steps(run: RunFormat, learner: str) -> int:
    """The inner steps of a learner's round: as planned, or, where they go by measured speed, as the fastest has."""
    sync, island = run.settings.sync, run.island(learner)
    planned = 1 if island is None else island.local_steps
    return max(planned, sync.every) if sync.local_steps == "measured" else planned


def offered_weight(run: RunFormat, learner: str, tokens: int, steps: int) -> float:
    """What a delta's tokens weigh (rules/merging.py). An island that has joined states its batch itself, and a batch
    weighs by its square: so it counts for no more than the largest of the launch."""
    if learner not in run.launched:
        tokens = min(tokens, steps * run.largest_batch_tokens)
    return token_weight(tokens, steps, run.settings.sync.weight)
