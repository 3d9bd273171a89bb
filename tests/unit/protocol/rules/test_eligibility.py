"""Each reason for refusing an offer without looking at its payload, and the offers that just pass."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.protocol.log.records import Outcome
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.merging import max_ahead, offered_weight, refusal
from tests.unit.protocol.records import RUN, applied, follow, genesis, merge, next_slot, offer

START, SKIPPED, MOST = genesis(), genesis(), max_ahead(RUN)
for _ in range(20):
    SKIPPED = follow(SKIPPED, "skip", slot=SKIPPED.slot)
OWN, SECOND, THIRD_LIFE = (merge(START, applied(**fields)) for fields in ({}, {"seq": 1}, {"incarnation": 3}))
OTHERS = merge(START, applied("l1"))
BLAMED = merge(START, applied("l1"), outcomes=(Outcome("l0", 2, 0, 0, "non_finite"),))


@pytest.mark.parametrize(
    ("state", "claims", "reason"),
    [
        (START, {}, None),
        (START, {"fragment": 1}, None),
        (START, {"learner": "l9"}, "unknown_learner"),
        (THIRD_LIFE, {"fragment": 1, "data_start": 8, "incarnation": 2, "seq": 7}, "old_incarnation"),
        (THIRD_LIFE, {"fragment": 1, "data_start": 8, "incarnation": 4}, None),
        (BLAMED, {"fragment": 1}, "old_incarnation"),  # a refusal of a newer one is enough
        (SECOND, {"fragment": 1, "seq": 1}, "settled"),
        (SECOND, {"fragment": 1, "seq": 0}, None),
        (SECOND, {"fragment": 1, "seq": 2}, None),
        (OTHERS, {"slot": 0}, "late"),
        (OTHERS, {"slot": 0, "tokens": 12, "data_end": 12}, "bad_claim"),  # nobody escapes blame by being late
        (START, {"slot": MOST}, None),
        (START, {"slot": MOST + RUN.num_fragments}, "too_early"),  # or others' slots would be skipped until then
        (START, {"base": 1}, "unknown_base"),
        (START, {"base_digest": "other"}, "wrong_base"),
        (START, {"base_digest": START.outputs[1].weights_digest}, "wrong_base"),
        (SKIPPED, {}, None),  # the current version is never too old
        (OWN, {"seq": 1, "data_start": 4}, "data_overlap"),
        (OWN, {"seq": 1, "data_start": 8}, None),
        (OWN, {"seq": 1, "data_start": 4, "fragment": 1}, None),
        (OWN, {"incarnation": 2, "data_start": 4}, "data_overlap"),
    ],
)
def test_an_offer_is_refused_for_this_reason(state: RunState, claims: dict[str, Any], reason: str | None) -> None:
    assert refusal(offer(state, **claims), state, RUN) == reason


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


def test_a_base_is_refused_beyond_the_staleness_limit_and_not_before() -> None:
    state = genesis()
    stale = offer(state)
    rounds = RUN.settings.sync.staleness_rounds + 1
    for slot in range(rounds * RUN.num_fragments):
        stale = replace(stale, slot=next_slot(state, 0))
        assert refusal(stale, state, RUN) is None, slot
        state = merge(state, applied("l1", slot, base=state.outputs[slot % 2].version, data_start=8 * slot))
    assert refusal(replace(stale, slot=next_slot(state, 0)), state, RUN) == "unknown_base"


def test_one_base_is_consumed_by_one_offer() -> None:
    state = genesis()
    second = offer(state, seq=1, slot=2, data_start=8)
    state = merge(state, applied(seq=0))
    assert refusal(second, state, RUN) == "base_consumed"
    assert refusal(replace(second, learner="l1"), state, RUN) is None
    assert refusal(offer(state, seq=1, data_start=8), state, RUN) is None


def test_an_island_that_joined_weighs_no_more_than_the_largest_of_the_launch_for_so_many_steps() -> None:
    largest = max(RUN.islands, key=lambda island: island.batch_tokens)
    batch, steps = largest.batch_tokens, 4
    run = replace(RUN, members=(replace(largest, name="new", batch_tokens=8 * batch),))
    planned = offered_weight(run, largest.name, steps * batch, steps)
    assert offered_weight(run, "new", steps * 8 * batch, steps) == planned > 0
    assert offered_weight(run, "new", steps * batch // 2, steps) < planned
