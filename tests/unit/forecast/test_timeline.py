"""How long a quorum is there: timelines written by hand, and histories beside mean values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.forecast.chips import DAY_MS, Timeline, equal_learners, fleet_goodput, fleet_uptime, presence, timeline
from diloco_cli.forecast.goodput import PUBLISHED, run_fleet

STEP_MS = 1000


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
    timelines = run_fleet(equal_learners(2_400_000, 4, PUBLISHED), DAY_MS, "fast", (3,))
    found = presence(timelines, 1)
    assert found.share == pytest.approx(fleet_uptime(timelines))
    assert found.goodput == pytest.approx(fleet_goodput(timelines))
    shares = [presence(timelines, quorum).share for quorum in (1, 2, 3, 4)]
    assert shares == sorted(shares, reverse=True)
    assert shares[3] < shares[0]
