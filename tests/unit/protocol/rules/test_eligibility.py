"""Each reason for refusing an offer without looking at its payload, and the offers that just pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.protocol.log.records import Outcome
from diloco_cli.protocol.rules.eligibility import REASONS, max_ahead, refusal
from tests.unit.protocol.records import RUN, applied, follow, genesis, merge, next_slot, offer


def test_an_offer_on_the_current_version_is_eligible() -> None:
    state = genesis()
    assert refusal(offer(state), state, RUN) is None
    assert refusal(offer(state, fragment=1), state, RUN) is None


def test_a_learner_that_the_run_does_not_name_is_refused() -> None:
    state = genesis()
    assert refusal(offer(state, learner="l9"), state, RUN) == "unknown_learner"


def test_an_older_incarnation_is_refused_once_a_newer_one_was_merged() -> None:
    state = merge(genesis(), applied(incarnation=3))
    late = offer(state, fragment=1, data_start=8)
    assert refusal(replace(late, incarnation=2, seq=7), state, RUN) == "old_incarnation"
    assert refusal(replace(late, incarnation=4), state, RUN) is None


def test_a_refusal_of_a_newer_incarnation_raises_the_floor_too() -> None:
    state = merge(genesis(), applied("l1"), outcomes=(Outcome("l0", 2, 0, 0, "non_finite"),))
    assert refusal(offer(state, fragment=1, incarnation=1), state, RUN) == "old_incarnation"


def test_an_offer_with_a_outcome_is_settled() -> None:
    state = merge(genesis(), applied(seq=1))
    assert refusal(offer(state, fragment=1, seq=1), state, RUN) == "settled"
    assert refusal(offer(state, fragment=1, seq=0), state, RUN) is None
    assert refusal(offer(state, fragment=1, seq=2), state, RUN) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"fragment": 2, "slot": 2, "base": 0},
        {"fragment": -1, "slot": 1},
        {"slot": 1},
        {"slot": -2},
        {"tokens": 7},
        {"steps": -2, "tokens": -8, "data_end": -8},
        {"data_start": -4, "data_end": 4},
        {"data_start": 8, "data_end": 0},
        {"data_end": 12},
        {"payload_bytes": 200_000_000_000},
    ],
)
def test_claims_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    state = genesis()
    assert refusal(replace(offer(state), **wrong), state, RUN) == "bad_claim"


@pytest.mark.parametrize(("tokens", "reason"), [(8, None), (7, None), (1, None), (9, "bad_claim"), (12, "bad_claim")])
def test_tokens_are_at_most_steps_times_the_islands_batch(tokens: int, reason: str | None) -> None:
    """Fewer while a part of the island was gone."""
    state = genesis()
    assert refusal(replace(offer(state), tokens=tokens, data_end=tokens), state, RUN) == reason


def test_an_offer_counts_for_the_slot_that_it_names_and_is_late_once_the_log_has_passed_it() -> None:
    state = genesis()
    mine = offer(state, slot=2)
    for slot in (0, 1, 2):
        assert state.slot == slot and refusal(mine, state, RUN) is None
        state = (
            follow(state, "skip", slot=slot) if slot == 1 else merge(state, applied("l1", slot, data_start=8 * slot))
        )
    assert refusal(mine, state, RUN) == "late"
    assert refusal(replace(mine, slot=4), state, RUN) is None
    assert refusal(replace(mine, slot=4, steps=0, tokens=0, data_end=0), state, RUN) == "no_weight"


def test_a_late_offer_of_an_impossible_claim_is_a_bad_claim() -> None:
    """Hostile reasons come first, or nobody who takes care to be late could be blamed."""
    state = merge(genesis(), applied("l1"))
    assert refusal(replace(offer(state), slot=0), state, RUN) == "late"
    assert refusal(replace(offer(state), slot=0, tokens=12, data_end=12), state, RUN) == "bad_claim"


def test_an_offer_for_a_slot_that_makes_any_base_too_old_is_refused() -> None:
    """One learner that names a slot far ahead must not make others' slots be skipped until then."""
    state, most = genesis(), max_ahead(RUN)
    assert refusal(offer(state, slot=most), state, RUN) is None
    assert refusal(offer(state, slot=most + RUN.num_fragments), state, RUN) == "too_early"


def test_a_base_that_the_log_never_had_is_refused() -> None:
    state = genesis()
    assert refusal(offer(state, base=1), state, RUN) == "unknown_base"
    assert refusal(offer(state, base_digest="other"), state, RUN) == "wrong_base"
    assert refusal(offer(state, base_digest=state.outputs[1].weights_digest), state, RUN) == "wrong_base"


def test_a_base_is_refused_beyond_the_staleness_limit_and_not_before() -> None:
    state = genesis()
    stale = offer(state)
    rounds = RUN.settings.sync.staleness_rounds + 1
    for slot in range(rounds * RUN.num_fragments):
        stale = replace(stale, slot=next_slot(state, 0))
        assert refusal(stale, state, RUN) is None, slot
        state = merge(state, applied("l1", slot, base=state.outputs[slot % 2].version, data_start=8 * slot))
    assert refusal(replace(stale, slot=next_slot(state, 0)), state, RUN) == "unknown_base"


def test_the_current_version_is_never_too_old() -> None:
    state = genesis()
    for _ in range(20):
        state = follow(state, "skip", slot=state.slot)
    assert refusal(offer(state), state, RUN) is None


def test_one_base_is_consumed_by_one_offer() -> None:
    state = genesis()
    second = offer(state, seq=1, slot=2, data_start=8)
    state = merge(state, applied(seq=0))
    assert refusal(second, state, RUN) == "base_consumed"
    assert refusal(replace(second, learner="l1"), state, RUN) is None
    assert refusal(offer(state, seq=1, data_start=8), state, RUN) is None


def test_overlapping_data_is_refused_per_fragment_and_adjacent_data_is_not() -> None:
    state = merge(genesis(), applied(seq=0, data_end=8))
    assert refusal(offer(state, seq=1, data_start=4), state, RUN) == "data_overlap"
    assert refusal(offer(state, seq=1, data_start=8), state, RUN) is None
    assert refusal(offer(state, fragment=1, seq=1, data_start=4), state, RUN) is None


def test_an_overlap_is_refused_for_a_newer_incarnation_as_well() -> None:
    state = merge(genesis(), applied(seq=0, data_end=8))
    assert refusal(offer(state, incarnation=2, seq=0, data_start=4), state, RUN) == "data_overlap"


def test_every_reason_is_explained() -> None:
    assert all(text and text == text.strip() for text in REASONS.values())
