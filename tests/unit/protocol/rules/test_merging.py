"""Which offers may enter a merge, what a delta weighs, and how far it is scaled down."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.log.health import GROWS, Known
from diloco_cli.protocol.log.records import Outcome
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.merging import (
    LEAST,
    DeltaShare,
    JudgedDelta,
    judge,
    max_ahead,
    offered_weight,
    refusal,
    token_weight,
)
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
    planned = offered_weight(run, largest.name, steps * batch, steps, steps * batch)
    many, few = steps * 8 * batch, steps * batch // 2
    assert offered_weight(run, "new", many, steps, many) == planned > 0
    assert offered_weight(run, "new", few, steps, few) < planned


def test_a_delta_weighs_as_much_less_as_is_believed_of_its_tokens() -> None:
    assert offered_weight(RUN, "l0", 8, 2, 2) == offered_weight(RUN, "l0", 8, 2, 8) / 4 > 0


quick = settings(max_examples=60)


def test_half_the_batch_at_equal_steps_weighs_a_quarter() -> None:
    assert token_weight(400, 10) == 4 * token_weight(200, 10) == 16_000


def test_equal_batches_weigh_in_proportion_to_steps() -> None:
    assert token_weight(800, 20) == 2 * token_weight(400, 10)


@pytest.mark.parametrize(("tokens", "steps"), [(0, 0), (0, 5), (5, 0), (-4, 2), (4, -2)])
def test_no_tokens_or_no_steps_weigh_nothing(tokens: int, steps: int) -> None:
    assert token_weight(tokens, steps) == 0.0


@quick
@given(st.integers(0, 1 << 53), st.integers(0, 1 << 53))
def test_a_weight_is_finite_and_zero_only_for_nothing(tokens: int, steps: int) -> None:
    weight = token_weight(tokens, steps)
    assert 0.0 <= weight < float("inf") and (weight == 0.0) == (tokens == 0 or steps == 0)


def test_mixed_batches_and_speeds_by_hand() -> None:
    """A: 10 steps of 400 tokens; B: 10 of 800; C: 5 of 800 (half as fast): quantity x quality."""
    a, b, c = (token_weight(steps * batch, steps) for steps, batch in ((10, 400), (10, 800), (5, 800)))
    assert (a, b, c) == (1_600_000.0, 6_400_000.0, 3_200_000.0)


H = 16
CLIP = SyncSettings().clip
assert CLIP != "none"


def delta(learner: str, norm: float, steps: int = H, weight: float = 1.0, stated: int | None = None) -> JudgedDelta:
    return JudgedDelta(learner, steps, steps if stated is None else stated, norm, weight)


def known(*norms: float) -> Known:
    """Of learners l0, l1, ..., in a round of H steps each."""
    return {f"l{i}": (norm, H) for i, norm in enumerate(norms)}


def judged(memory: Known, *norms: float) -> list[DeltaShare]:
    return judge(memory, [delta(f"l{i}", norm) for i, norm in enumerate(norms)], CLIP)


def lengths(memory: Known, *norms: float) -> list[float]:
    """Of deltas of H steps, as they are merged."""
    return [norm * verdict.scale for norm, verdict in zip(norms, judged(memory, *norms), strict=True)]


def test_a_delta_that_is_longer_than_usual_is_clipped_and_why_is_said() -> None:
    verdict = judged({}, 1.0, 1.0, 45.0)[2]
    assert verdict.scale == pytest.approx(1 / 45) and verdict.weight == 1.0
    assert verdict.reason == "l2's delta is 45 times as long as usual: clipped to that"
    assert judged({}, 1.0, 1.0, CLIP * 0.999)[2] == DeltaShare(1.0, 1.0)


def test_where_too_few_are_there_to_compare_what_is_remembered_counts_with_room_for_growth() -> None:
    assert lengths(known(1.0, 1.0, 1.0), CLIP * GROWS * 0.999) == [CLIP * GROWS * 0.999]
    assert lengths(known(1.0, 1.0, 1.0), 1.0, 45.0) == pytest.approx([1.0, GROWS])


def test_among_three_the_others_count_as_well_and_the_lesser_bound_holds() -> None:
    assert lengths({}, 1.0, 1.0, 1e6) == pytest.approx([1.0, 1.0, 1.0])
    assert lengths(known(9.0, 9.0, 9.0), 1.0, 1.0, 1e6)[2] == pytest.approx(1.0)
    assert lengths(known(1.0, 1.0, 1.0), 9.0, 9.0, 1e6) == pytest.approx([GROWS] * 3)


def test_what_nothing_is_known_of_is_merged_as_it_is() -> None:
    assert lengths({}, 1e6) == [1e6] and lengths({}, 1.0, 1e6) == [1.0, 1e6], "of two nobody can tell"
    assert lengths({"l0": (0.0, H)}, 1e6) == [1e6]


def test_a_run_may_clip_nothing() -> None:
    assert judge(known(1.0), [delta("l0", 1e9)], "none") == [DeltaShare(1.0, 1.0)]


def test_of_two_that_are_remembered_the_longer_one_counts_so_that_short_ones_have_nobody_clipped() -> None:
    assert lengths(known(1.0, 1e-9), 1.0) == [1.0]


def test_a_minority_makes_no_delta_longer_and_has_no_honest_one_clipped() -> None:
    draw = random.Random(3)
    for _ in range(300):
        honest = [draw.uniform(0.5, 2.0) for _ in range(draw.randrange(2, 20))]
        hostile = [10 ** draw.uniform(-9, 9) for _ in range(len(honest) - 1)]
        memory = known(*(honest if draw.random() < 0.5 else []), *hostile[: len(honest) // 2])
        memory = memory if len(memory) > len(honest) else {}
        found = lengths(memory, *honest, *hostile)
        assert max(found) <= CLIP * max(honest) * (1 + 1e-9)
        assert max(honest) > CLIP * min(honest) or found[: len(honest)] == honest


def test_a_delta_that_holds_next_to_nothing_weighs_next_to_nothing_beside_others() -> None:
    """Or one of three empty ones would take a third from the length of the merge."""
    weights = [verdict.weight for verdict in judged({}, 1.0, 1.0, 1.0, 0.25, 0.0)]
    assert weights == [1.0, 1.0, 1.0, 0.5, LEAST]
    assert [verdict.weight for verdict in judged(known(1.0), 1.0, 0.0)] == [1.0, 1.0], "of two nobody can tell"
    assert [verdict.weight for verdict in judged({}, 1.0, 1.0, 1e6)] == [1.0, 1.0, 1.0], (
        "nor do long ones make it light"
    )


def test_beside_deltas_of_which_few_steps_are_believed_a_usual_one_keeps_its_weight() -> None:
    doubted = [delta(name, 3.0, steps=2, stated=4 * H) for name in "bc"]
    assert judge({}, [delta("a", 1.0), *doubted], CLIP)[0] == DeltaShare(1.0, 1.0)


def test_beside_an_honest_delta_that_is_believed_in_part_a_hostile_one_is_no_longer_for_it() -> None:
    newcomer = delta("b", 1.0, steps=2, stated=H)
    verdicts = judge({}, [delta("a", 1.0), newcomer, delta("c", 1e6)], CLIP)
    assert verdicts[2].scale == pytest.approx(1e-6) and verdicts[0].scale == 1.0


def test_deltas_of_other_numbers_of_steps_are_clipped_beyond_what_honest_ones_grow() -> None:
    usual = [delta("a", 1.0), delta("b", 1.0)]
    few = H // 4
    assert judge({}, [*usual, delta("c", CLIP / 2, few)], CLIP)[2].scale == 1.0
    assert judge({}, [*usual, delta("c", 2 * CLIP, few)], CLIP)[2].scale == pytest.approx(0.25 / CLIP)
    slow = [delta("a", 1.0, few), delta("b", 1.0, few)]
    assert judge({}, [*slow, delta("c", 4 * CLIP)], CLIP)[2].scale == 1.0, "in proportion to the steps"
