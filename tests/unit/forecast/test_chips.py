"""How slices fail and come back, and how long a quorum is present: small cases by hand."""

from __future__ import annotations

from dataclasses import replace
from math import gamma

import numpy as np
import pytest

from diloco_cli.forecast.chips import (
    DAY_MS,
    Constants,
    Repair,
    Slices,
    Timeline,
    equal_learners,
    fleet_goodput,
    fleet_uptime,
    generator,
    leap,
    one_cluster,
    presence,
    repairs_ms,
    timeline,
)
from diloco_cli.forecast.goodput import PUBLISHED

STEP_MS = 1000
NEARLY_FIXED = Repair(scale_s=60.0, shape=1e6)  # 60.000 s, whatever is drawn


@pytest.mark.parametrize(
    ("repair", "mean_s"),
    [
        (Repair(60.0), 60.0),  # exponential
        (Repair(60.0, shape=2.0), 60.0 * gamma(1.5)),  # Weibull
        (Repair(60.0, exponent=2.0), 90.0),  # the later of two exponentials: 1 + 1/2
    ],
)
def test_the_mean_is_that_of_the_textbook(repair: Repair, mean_s: float) -> None:
    assert repair.mean_s == pytest.approx(mean_s, rel=1e-3)
    assert repair.with_mean(7.0).mean_s == pytest.approx(7.0, rel=1e-3)


def test_draws_have_the_mean_of_their_distribution() -> None:
    delays = repairs_ms(Repair(60.0, shape=1.3, exponent=1.2), generator(1))
    drawn = [next(delays) for _ in range(40_000)]
    assert np.mean(drawn) / 1000 == pytest.approx(Repair(60.0, 1.3, 1.2).mean_s, rel=0.02)
    assert all(isinstance(delay, int) and delay > 0 for delay in drawn[:10])


def slices(elastic: bool = True, count: int = 4) -> Slices:
    constants = replace(Constants(), slice_chips=1, repair=NEARLY_FIXED)
    return Slices(replace(equal_learners(count, 1, constants)[0], elastic=elastic), generator(0))


def test_a_failure_costs_a_downscale_and_the_slice_is_back_after_its_repair() -> None:
    found = slices()
    assert found.fail(1, now_ms=100_000) == 115_000
    assert (found.active, found.next_return_ms) == (3, 160_000)


def test_a_slice_that_returns_during_a_downscale_joins_for_nothing() -> None:
    found = slices()
    found.fail(1, now_ms=100_000)
    assert found.fail(1, now_ms=150_000) == 165_000  # the first is back at 160 s, in the middle of this stop
    assert (found.active, found.next_return_ms) == (3, 210_000)


def test_with_nothing_left_the_learner_waits_for_the_first_return_and_an_upscale() -> None:
    found = slices(count=1)
    assert found.fail(1, now_ms=100_000) == 160_000 + 15_000
    assert found.active == 1


def test_without_elasticity_everything_waits_for_the_last_return_and_an_upscale() -> None:
    found = slices(elastic=False)
    assert found.fail(3, now_ms=100_000) == 160_000 + 15_000
    assert (found.active, found.failures) == (4, 3)


def test_without_elasticity_the_longest_repair_counts() -> None:
    repair = Repair(60.0)
    constants = replace(Constants(), slice_chips=1, repair=repair)
    found = Slices(replace(equal_learners(4, 1, constants)[0], elastic=False), generator(0))
    delays = [delay for delay, _ in zip(repairs_ms(repair, generator(0)), range(3), strict=False)]
    assert len(set(delays)) == 3
    assert found.fail(3, now_ms=100_000) == 100_000 + max(delays) + 15_000


def test_a_repair_of_ages_is_a_whole_number_too() -> None:
    assert 0 < next(repairs_ms(Repair(1e300), generator(0))) < 1 << 62


def test_goodput_counts_a_smaller_step_in_part_and_uptime_is_the_union_of_all() -> None:
    first, second = equal_learners(8, 2, replace(Constants(), slice_chips=1))
    # 100 s. First: 4 full steps from 0 s, 4 steps with 3 of 4 slices from 40 s: (20 + 15) / 100.
    one = timeline(first, 100_000, [(0, 4, 4), (40_000, 4, 3), (90_000, 0, 4)], failures=1)
    # Second: 8 full steps from 10 s to 50 s: 40 / 100.
    two = timeline(second, 100_000, [(10_000, 8, 4)], failures=0)
    assert (one.goodput, two.goodput) == (pytest.approx(0.35), pytest.approx(0.40))
    assert fleet_goodput([one, two]) == pytest.approx(0.375)
    assert fleet_uptime([one, two]) == pytest.approx(0.60)  # [0, 60) without a gap


def test_data_parallel_has_all_slices() -> None:
    learners = equal_learners(1_200_000, 8, Constants())
    cluster = one_cluster(learners, elastic=True, constants=Constants())
    assert cluster.slices == 8 * 73
    assert cluster.slices * cluster.failures_per_s == pytest.approx(1_200_000 / Constants().mtbi_s)


def two_learners() -> list[Timeline]:
    """Of 100 s: one steps from 0 to 60 and weighs three times as much, the other from 40 to 90."""
    pair = [replace(one, slices=1, step_ms=STEP_MS) for one in equal_learners(4096, 2, PUBLISHED)]
    horizon_ms = 100 * STEP_MS
    return [
        timeline(replace(pair[0], weight=3.0), horizon_ms, [(0, 60, 1)], 0),
        timeline(replace(pair[1], weight=1.0), horizon_ms, [(40 * STEP_MS, 50, 1)], 0),
    ]


@pytest.mark.parametrize(
    ("quorum", "share", "goodput"), [(1, 0.9, (3 * 60 + 50) / 400), (2, 0.2, (3 * 20 + 20) / 400), (3, 0.0, 0.0)]
)
def test_only_what_is_done_while_so_many_are_there_counts(quorum: int, share: float, goodput: float) -> None:
    found = presence(two_learners(), quorum)
    assert (found.share, found.goodput) == pytest.approx((share, goodput))


def test_without_a_quorum_learners_step_on_up_to_the_drift_bound() -> None:
    """Both are there from 40 to 60 s. Alone, each steps on for 15 s: from 0 to 15 and from 60 to 75."""
    found = presence(two_learners(), 2, drift_s=15.0)
    assert found.share == pytest.approx(0.2)
    assert found.goodput == pytest.approx((3 * (15 + 20) + (20 + 15)) / 400)
    assert found.uptime == pytest.approx(0.15 + 0.2 + 0.15)
    assert presence(two_learners(), 2, drift_s=1e9).goodput == pytest.approx((3 * 60 + 50) / 400)
    assert presence(two_learners(), 2, drift_s=1e9).uptime == pytest.approx(0.9)


def test_nobody_ever_there_is_no_quorum() -> None:
    assert presence([timeline(two_learners()[0].learner, 1000, [], 0)], 1).share == 0.0


def test_a_quorum_of_one_is_the_fleets_own_uptime_and_goodput() -> None:
    """Two ways to the same figures: the union of stretches, and moments between which the number is constant."""
    timelines = leap(equal_learners(2_400_000, 4, PUBLISHED), DAY_MS, generator(3))
    found = presence(timelines, 1)
    assert found.share == pytest.approx(fleet_uptime(timelines))
    assert found.goodput == pytest.approx(fleet_goodput(timelines))
    shares = [presence(timelines, quorum).share for quorum in (1, 2, 3, 4)]
    assert shares == sorted(shares, reverse=True)
    assert shares[3] < shares[0]
