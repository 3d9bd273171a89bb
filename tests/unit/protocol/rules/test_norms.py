"""Deltas judged by their norms: against what the log remembers, and together with the others of their slot."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.log.norms import FOLLOWS, NEW, NOTHING, FragmentNorms, Usual
from diloco_cli.protocol.rules.norms import (
    CAP,
    EMPTY_WEIGHT,
    FEWEST_MERGES,
    FULL,
    OPPOSING_WEIGHT,
    JudgedDelta,
    Judgement,
    counted_steps,
    fullness,
    judge,
)

H = 16


def delta(learner: str, steps: int, norm: float, weight: float = 1.0) -> JudgedDelta:
    return JudgedDelta(learner, steps, norm, weight, round_steps=H)


def known(*norms: float, steps: int = H, merged: tuple[float, ...] = ()) -> FragmentNorms:
    """Of learners l0, l1, ..."""
    return FragmentNorms({f"l{i}": Usual(norm, steps, 9, 8) for i, norm in enumerate(norms)}, {}, merged)


def judged(memory: FragmentNorms, *norms: float, steps: int = H, **sync: Any) -> Judgement:
    """Deltas of l0, l1, ... with equal weights."""
    deltas = [delta(f"l{i}", steps, norm, 1.0) for i, norm in enumerate(norms)]
    return judge(memory, deltas, SyncSettings(**sync))


def refused(memory: FragmentNorms, *norms: float, **options: Any) -> list[int]:
    verdicts = judged(memory, *norms, **options).verdicts
    return [place for place, verdict in enumerate(verdicts) if verdict.refused]


# -- the reference ------------------------------------------------------------------------------------------------


def test_what_is_longer_than_the_cap_times_the_usual_is_refused_and_why_is_said() -> None:
    memory = known(1.0, 1.0, 1.0)
    assert refused(memory, CAP, CAP * 1.01) == [1]
    verdict = judged(memory, 1.0, 45.2).verdicts[1]
    assert (
        verdict.refused == "l1's delta of 16 steps is 45.2 times as long as this fragment's usual delta; 8 are allowed"
    )


def test_one_of_three_that_was_long_before_moves_no_bound() -> None:
    for own in (1e-9, 1.0, 50.0):
        assert refused(known(1.0, 1.1, own), 1.0, 1.0, 1.2 * CAP) == [2]


def test_of_two_the_longer_one_counts_so_that_short_ones_have_nobody_refused() -> None:
    assert refused(known(1.0, 1e-9), 1.0, 1e-9) == [] and refused(known(1.0, 1e-9), CAP * 1.01, 1e-9) == [0]


def test_a_minority_moves_the_bound_by_no_more_than_the_honest_differ() -> None:
    draw = random.Random(3)
    for _ in range(300):
        honest = [draw.uniform(0.5, 2.0) for _ in range(draw.randrange(2, 20))]
        hostile = [10 ** draw.uniform(-9, 9) for _ in range(len(honest) - 1)]
        memory, long = known(*honest, *hostile), CAP * max(honest) * 1.001
        deltas = [delta(f"l{i}", H, norm, 1.0) for i, norm in enumerate(honest)]
        deltas += [delta(f"l{len(honest) + i}", H, long, 1.0) for i in range(len(hostile))]
        verdicts = judge(memory, deltas, SyncSettings()).verdicts
        assert [bool(verdict.refused) for verdict in verdicts] == [False] * len(honest) + [True] * len(hostile)


def test_batches_of_too_long_deltas_are_all_refused_at_once() -> None:
    """4 of 16, and 8 of 64, whatever they agree on."""
    for hostile, learners in ((4, 16), (8, 64)):
        norms = [1000.0] * hostile + [1.0] * (learners - hostile)
        assert refused(known(*[1.0] * learners), *norms) == list(range(hostile))
        assert refused(NOTHING, *norms) == list(range(hostile)), "without a reference too"


# -- company ------------------------------------------------------------------------------------------------------


def test_without_a_reference_three_in_a_slot_are_compared_with_each_other() -> None:
    assert refused(NOTHING, 1.0, 1.2, 1000.0) == [2]
    assert "the slot's other deltas" in judged(NOTHING, 1.0, 1.2, 1000.0).verdicts[2].refused
    assert refused(NOTHING, 1.0, 1e-9, 1.2) == []


def test_two_have_no_majority() -> None:
    assert refused(NOTHING, 1.0, 1000.0) == [] and refused(NOTHING, 1000.0) == []


def unfit(memory: FragmentNorms, *deltas: JudgedDelta) -> list[bool]:
    return [bool(verdict.refused) for verdict in judge(memory, deltas, SyncSettings()).verdicts]


def test_the_only_learner_that_is_known_decides_on_others_only_where_no_third_one_is_there() -> None:
    memory = FragmentNorms({"l9": Usual(1.0, H, 9, 8)})
    long, known_one = delta("l0", H, 100.0), delta("l9", H, 1.0)
    assert unfit(memory, long) == [True] and unfit(memory, known_one) == [False]
    assert unfit(memory, known_one, long) == [False, True], "it has one voice, however often it offers"
    assert unfit(memory, long, delta("l1", H, 60.0)) == [False, False]
    assert unfit(memory, long, delta("l1", H, 1.0)) == [True, False]
    assert refused(memory, 100.0, 100.0, 100.0) == [], "three that agree know better than one"
    assert refused(memory, 100.0, 100.0, 1.0, 1000.0) == [3]


def test_a_learner_of_one_merge_is_not_known_yet() -> None:
    assert refused(FragmentNorms({"l0": Usual(1.0, H, 0, 1)}), 100.0) == []


# -- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, H, 3 * H, 8 * H])
@pytest.mark.parametrize("power", [0.5, 0.75, 1.0])
def test_an_honest_delta_of_any_number_of_steps_is_fit(steps: int, power: float) -> None:
    """Slow and fast islands, and one that brings all that it made in an outage, in one slot and against the log."""
    norm = (steps / H) ** power
    assert refused(known(1.0, 1.0, 1.0), 1.0, 1.0) == []
    deltas = [delta("l0", H, 1.0, 1.0), delta("l1", H, 1.0, 1.0), delta("l2", steps, norm, 1.0)]
    for memory in (NOTHING, known(1.0, 1.0, 1.0)):
        assert not any(verdict.refused for verdict in judge(memory, deltas, SyncSettings()).verdicts)


def test_a_claim_of_more_steps_allows_no_more_than_these_could_make() -> None:
    memory = known(1.0, 1.0, 1.0)
    assert refused(memory, 4 * CAP * 1.01, steps=4 * H) == [0] and refused(memory, 4 * CAP * 0.99, steps=4 * H) == []


@pytest.mark.parametrize("claim", [2, 8])
def test_more_steps_than_a_round_has_buy_neither_weight_nor_length(claim: int) -> None:
    memory = known(1.0, 1.0, 1.0)
    for others in (["l0", "l1"], ["l0"]):
        deltas = [*(delta(name, H, 1.0) for name in others), delta("x", claim * H, 5.0, float(claim))]
        verdict = judge(memory, deltas, SyncSettings()).verdicts[-1]
        assert (verdict.weight, verdict.scale) == (1.0, 0.25)


def test_steps_count_as_far_as_the_slots_other_deltas_have_them() -> None:
    """After an outage all bring more; whoever is alone in the run is believed."""
    all_late = [delta(f"l{i}", 3 * H, 3.0, 3.0) for i in range(3)]
    assert {(v.weight, v.scale) for v in judge(known(1.0, 1.0, 1.0), all_late, SyncSettings()).verdicts} == {(3.0, 1.0)}
    assert counted_steps(NOTHING, [delta("l0", 5 * H, 1.0)]) == [5 * H]
    assert counted_steps(known(1.0, 1.0), [delta("l0", 5 * H, 1.0)]) == [H], "another is known"


def test_a_slow_islands_few_steps_lower_no_others_weight() -> None:
    deltas = [delta("slow", 2, 0.1), delta("slower", 1, 0.05), delta("fast", H, 1.0, 9.0)]
    assert judge(NOTHING, deltas, SyncSettings()).verdicts[2].weight == 9.0


# -- scales and weights -------------------------------------------------------------------------------------------


def scales(memory: FragmentNorms, *norms: float, **options: Any) -> list[float]:
    return [round(verdict.scale, 9) for verdict in judged(memory, *norms, **options).verdicts]


def test_the_clip_scales_down_to_so_many_times_the_others_of_the_slot() -> None:
    assert scales(NOTHING, 1.0, 0.8, 4.0, clip=2.0) == [1.0, 1.0, 0.5], "before anything is usual too"
    assert scales(known(1.0, 1.0, 1.0), 1.0, 0.8, 5.0) == [1.0, 1.0, 0.25], "1.25 by default"
    assert scales(NOTHING, 1.0, 0.8, 4.0, clip="none") == [1.0] * 3


def test_without_others_the_clip_goes_by_what_three_learners_are_known_for() -> None:
    assert scales(known(1.0, 1.0, 9.0), 5.0) == scales(known(1.0, 1.0, 9.0), 5.0, 1.0)[:1] == [0.25]
    assert scales(known(1.0, 1.0), 5.0, 1.0) == [1.0, 1.0], "of two nobody knows whose are too long"
    young = FragmentNorms({f"l{i}": Usual(1.0, H, 9, NEW - 1) for i in range(3)})
    assert scales(young, 5.0) == [1.0], "in warm-up norms grow fast"


def test_most_of_a_slot_lengthens_what_is_merged_no_faster_than_the_memory_follows() -> None:
    assert scales(known(1.0, 1.0, 1.0), 7.5, 7.5, 1.0, clip=1.0) == [0.2, 0.2, 1.0]
    assert FOLLOWS / 7.5 == 0.2


def test_a_learner_that_opposes_is_as_long_as_a_single_other_whatever_steps_it_states() -> None:
    """After an outage an honest learner may hold two steps. A 64th of eight rounds' length would outweigh them."""
    honest, flipped = delta("l0", 2, 0.3), replace(delta("x0", 8 * H, 6.0), opposes=True)
    young = known(0.3, steps=2)
    assert [v.scale for v in judge(young, [honest, flipped], SyncSettings()).verdicts] == pytest.approx([1.0, 0.0625])
    trusted = judge(young, [honest, replace(flipped, opposes=False)], SyncSettings())
    assert [verdict.scale for verdict in trusted.verdicts] == [1.0, 1.0], "of two nobody knows whose are too long"
    accomplices = [delta("x1", 2, 0.0), delta("x2", 2, 50.0)]  # nothing, and what is refused
    beside = judge(young, [honest, flipped, *accomplices], SyncSettings())
    assert beside.verdicts[3].refused and beside.verdicts[1].scale == pytest.approx(0.0625)
    alone = judge(young, [flipped], SyncSettings())
    assert alone.verdicts[0].scale == OPPOSING_WEIGHT, "with nobody to compare it with"


def weights(memory: FragmentNorms, *norms: float, **options: Any) -> list[float]:
    return [verdict.weight for verdict in judged(memory, *norms, **options).verdicts]


def test_a_delta_that_holds_next_to_nothing_weighs_next_to_nothing() -> None:
    """It would shorten the others' step by its share of the tokens. Long ones make no other light."""
    assert weights(NOTHING, 1.0, 1.2, 0.25) == [1.0, 1.0, pytest.approx(0.25 / FULL)]
    assert weights(NOTHING, 1.0, 1.2, 7.5) == weights(NOTHING, 1.0, 1.2, 0.7) == [1.0] * 3
    assert weights(NOTHING, 1.0, 1.0, 0.0) == [1.0, 1.0, EMPTY_WEIGHT], "never none at all"
    assert weights(NOTHING, 1.0, 1.2, 0.25, clip="none") == [1.0] * 3
    assert weights(known(1.0, 1.0, 0.1), 1.0, 0.1) == [1.0, pytest.approx(0.2)], "by what is usual"
    assert weights(known(1.0, 0.1), 1.0, 0.1) == weights(NOTHING, 1.0, 0.0) == [1.0, 1.0], "of two nobody knows"


def test_deltas_that_are_all_short_weigh_in_full_also_beside_one_that_opposes() -> None:
    memory = known(1.0, 1.0, 1.0)
    assert weights(memory, 0.01) == [1.0] and weights(memory, 0.02, 0.01) == [1.0, 0.5]
    assert weights(memory, 0.0, 0.0) == [EMPTY_WEIGHT] * 2
    opposing = replace(delta("x", H, 0.01), opposes=True)
    found = judge(memory, [delta("l0", H, 0.01), opposing], SyncSettings()).verdicts
    assert [verdict.weight for verdict in found] == [1.0, OPPOSING_WEIGHT]


def test_few_steps_make_no_delta_light_and_many_none_heavy() -> None:
    def lengths(*deltas: JudgedDelta) -> list[float]:
        return fullness(NOTHING, deltas, counted_steps(NOTHING, deltas), SyncSettings())

    round_ones = [delta("l0", H, 1.0), delta("l1", H, 1.0)]
    assert lengths(*round_ones, delta("l2", 1, 1.0 / H)) == [1.0] * 3
    assert lengths(*round_ones, delta("l2", 1, 1.0 / H**2)) == [1.0] * 3, "while its learning rate rises again"
    assert lengths(*round_ones, delta("l2", H, 1.0 / H))[2] == pytest.approx(2 / H)
    assert lengths(*round_ones, delta("l2", 8 * H, 1.0)) == [1.0] * 3, "after an outage its rounds count as one"
    assert lengths(*[delta(f"l{i}", 2, 2 / H) for i in range(2)], delta("l2", 4 * H, 1.0)) == [1.0] * 3


def test_only_the_company_judges_who_was_readmitted() -> None:
    memory = msgspec.structs.replace(known(1.0, 1.0, 1.0), trusted=("l1",))
    assert weights(memory, 1.0, 0.01) == [1.0, 1.0] and weights(memory, 1.0, 0.1, 1.0)[1] == pytest.approx(0.2)


def test_the_share_that_a_learner_may_have_counts_before_it_loses_weight() -> None:
    assert weights(NOTHING, 1.0, 1.0, 0.0, max_share=0.34) == [1.0, 1.0, EMPTY_WEIGHT], "nobody gains by it"


def test_honest_deltas_of_a_slot_are_left_as_they_are() -> None:
    """Within a quarter of the slot's others; in warm-up they may all be far above the memory."""
    for norms in ((1.0, 0.9, 1.1), (10.0, 11.0, 9.0)):
        young = FragmentNorms({f"l{i}": Usual(1.0, H, 9, 3) for i in range(3)})
        assert scales(young, *norms) == [1.0] * 3


def test_of_a_merge_that_is_too_long_the_long_delta_alone_is_shortened() -> None:
    memory = known(1.0, 1.0, 1.0, merged=(1.0,) * FEWEST_MERGES)
    found = judged(memory, 1.0, 1.0, 7.0, max_step=2.0, clip="none")
    assert found.step == pytest.approx(2 / 3), "of a mean length of 3, 2 is left"
    assert [verdict.scale for verdict in found.verdicts] == pytest.approx([1.0, 1.0, 4 / 7])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_of_a_merge_that_is_too_long_has_the_length_that_it_may_have(seed: int) -> None:
    dice = random.Random(seed)
    memory = known(1.0, 1.0, 1.0, merged=(1.0,) * FEWEST_MERGES)
    norms = [dice.uniform(0.5, 7.0) for _ in range(dice.randint(1, 6))]
    found = judged(memory, *norms, max_step=1.0, clip="none")
    lengths = [verdict.scale * norm for verdict, norm in zip(found.verdicts, norms, strict=True)]
    assert sum(lengths) / len(lengths) == pytest.approx(min(1.0, sum(norms) / len(norms)))
    assert all(own == norm or own == pytest.approx(max(lengths)) for own, norm in zip(lengths, norms, strict=True))


def test_a_merge_longer_than_so_many_usual_ones_is_shortened_as_a_whole() -> None:
    memory = known(1.0, 1.0, 1.0, merged=(1.0,) * FEWEST_MERGES)
    found = judged(memory, 3.0, 3.0, 6.0, max_step=2.0, clip="none")
    assert found.step == 0.5
    assert [verdict.scale * norm for verdict, norm in zip(found.verdicts, (3, 3, 6), strict=True)] == pytest.approx(
        [2.0] * 3
    )
    assert (
        judged(memory, 3.0, 3.0, 6.0, max_step="none", clip="none").step
        == judged(memory, 2.0, 2.0, max_step=2.0).step
        == 1.0
    )
    few = known(1.0, 1.0, merged=(1.0,) * (FEWEST_MERGES - 1))
    assert judged(few, 6.0, 6.0, max_step=2.0).step == 1.0


def test_refused_deltas_neither_lengthen_nor_weigh_in_the_merge() -> None:
    memory = known(1.0, 1.0, 1.0, merged=(1.0,) * FEWEST_MERGES)
    found = judged(memory, 1.0, 1.0, 1e6, max_share=0.5)
    assert found.step == 1.0 and [verdict.weight for verdict in found.verdicts] == [1.0, 1.0, 0.0]


def test_no_learner_weighs_more_than_its_share() -> None:
    deltas = [delta("l0", H, 1.0, 1.0), delta("l1", H, 1.0, 8.0), delta("l2", H, 1.0, 1.0)]
    weights = [verdict.weight for verdict in judge(NOTHING, deltas, SyncSettings(max_share=0.5)).verdicts]
    assert weights == [1.0, 2.0, 1.0]
    assert [v.weight for v in judge(NOTHING, deltas, SyncSettings()).verdicts] == [1.0, 8.0, 1.0]


def test_deltas_of_zero_are_fit_and_say_nothing_of_others() -> None:
    assert refused(NOTHING, 0.0, 0.0, 1.0) == [] and refused(known(1.0, 1.0), 0.0, 1.0) == []


def test_each_is_compared_with_the_others_alone() -> None:
    """By hand: the median of all but one, for any number and any ties."""
    draw = random.Random(7)
    for _ in range(300):
        norms = [draw.choice([1.0, 1.0, 2.0, 30.0, draw.uniform(0.5, 40.0)]) for _ in range(draw.randrange(3, 9))]
        others = [sorted(norms[:place] + norms[place + 1 :]) for place in range(len(norms))]
        by_hand = [i for i, own in enumerate(norms) if own > CAP * others[i][len(others[i]) // 2]]
        assert refused(NOTHING, *norms) == by_hand
