"""The pace that a run sustains, and curves that stay bounded."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from diloco_cli.protocol.log.commits import EpochStart, Rollback, Stop, metrics_after
from diloco_cli.protocol.log.metrics import MAX_BESTS, Metrics, Sustained, thinned

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def merged(
    known: Sustained, from_s: float, every_s: float, count: int, tokens: int = 100, alive: int = 1
) -> Sustained:  # fmt: skip
    for i in range(count):
        known = known.merged(at(from_s + i * every_s), tokens, alive)
    return known


def test_a_pace_held_for_five_windows_is_sustained() -> None:
    four = merged(Sustained(), 0.0, 1.0, 41)
    assert (four.rates, four.best(1)) == ((100.0,) * 4, 0.0)
    assert merged(four, 41.0, 1.0, 10).best(1) == 100.0


def test_windows_last_for_ten_merges_and_five_seconds() -> None:
    fast = merged(Sustained(), 0.0, 0.1, 52)
    assert fast.rates == (pytest.approx(1000.0),)
    slow = merged(Sustained(), 0.0, 60.0, 11)
    assert slow.last == (600.0, 1000)


def test_offers_that_piled_up_in_an_outage_do_not_make_the_best_pace() -> None:
    known = merged(Sustained(), 0.0, 1.0, 51)
    known = merged(known, 330.0, 0.1, 200)  # ten minutes of nothing, then twenty seconds of offers that had piled up
    known = merged(known, 350.0, 1.0, 30)
    assert known.best(1) == 100.0


def test_a_new_syncer_a_stop_and_a_rollback_begin_anew_and_keep_the_best() -> None:
    known = Metrics(sustained=merged(Sustained(), 0.0, 1.0, 56))
    rollback = Rollback(to=0, outputs=())
    for commit in (Stop(), EpochStart(), rollback):
        assert metrics_after(known, commit, 0).sustained == Sustained(bests=((1, 100.0),))


def test_the_time_between_a_stop_and_the_next_syncer_is_rest() -> None:
    known = Metrics()
    for commit in (Stop(time=at(10)), EpochStart(time=at(70)), EpochStart(time=at(90)), Stop(time=at(100))):
        known = metrics_after(known, commit, 0)
    assert (known.rested_s, known.resumed_at, known.stopped_at) == (60.0, at(70), at(100))
    assert metrics_after(known, EpochStart(time=at(40)), 0).rested_s == 60.0, "another clock"


def test_a_clock_that_goes_back_or_is_none_begins_anew() -> None:
    known = merged(Sustained(), 100.0, 1.0, 5)
    assert known.merged(at(0.0), 100, 1).merges == 0
    assert known.merged("noon", 100, 1).since == "noon"


def test_the_present_pace_counts_the_last_whole_window_and_the_present_one() -> None:
    known = merged(Sustained(), 0.0, 1.0, 51)
    assert known.share_of_best(0.0, 1) == pytest.approx(1.0)
    assert merged(known, 54.0, 4.0, 5).share_of_best(20.0, 1) == pytest.approx(0.5)
    assert Sustained().share_of_best(5.0, 1) is None


def test_what_guests_added_is_no_measure_for_those_that_are_left() -> None:
    two = merged(Sustained(), 0.0, 1.0, 51, alive=2)
    four = merged(two, 51.0, 1.0, 60, tokens=200, alive=4)
    assert four.bests == ((2, 100.0), (4, 200.0))
    left = merged(four, 111.0, 1.0, 20, alive=2)
    assert left.share_of_best(0.0, 2) == pytest.approx(1.0), "as they did alone"
    assert left.share_of_best(0.0, 4) == pytest.approx(0.5), "as long as the guests are here, it is slow"
    guests_first = merged(Sustained(), 0.0, 1.0, 51, alive=4)
    assert guests_first.share_of_best(0.0, 2) is None, "what two can do is not known yet"


def test_best_paces_are_few_and_a_slower_one_of_more_learners_is_none() -> None:
    known = merged(Sustained(), 0.0, 1.0, 51, alive=2)
    assert merged(known, 51.0, 2.0, 60, alive=3).bests == ((2, 100.0),)
    for crew in range(3, 40):
        known = merged(known, crew * 1e4, 1.0, 60, tokens=100 * crew, alive=crew)
    assert len(known.bests) == MAX_BESTS and known.bests[-1] == (39, 3900.0)
    faster = merged(known, 1e6, 1.0, 60, tokens=10_000, alive=2)
    assert faster.bests == ((2, 10_000.0),)


Curve = list[tuple[float, float]]


def curve_of(values: Sequence[float], most: int) -> Curve:
    found: Curve = []
    for n, at in enumerate(values):
        found = thinned([*found, (at, float(n))], most, lambda point: point[0])
        assert len(found) <= most
    return found


@pytest.mark.parametrize("count", [10, 512, 1_000, 30_000])
def test_every_tenth_of_a_run_has_its_share_of_the_points(count: int) -> None:
    """The newest may have more: all that came since the curve was full."""
    found = curve_of(range(count), 512)
    assert found[0][0] == 0 and found[-1][0] == count - 1
    tenths = [sum(part <= 10 * at / count < part + 1 for at, _ in found) for part in range(10)]
    assert min(tenths) >= min(count, 250) // 20, tenths


@pytest.mark.parametrize("values", [[1.0] * 3_000, [float(n % 700) for n in range(3_000)]])
def test_it_is_bounded_where_time_stands_still_or_goes_back(values: list[float]) -> None:
    found = curve_of(values, 100)
    assert found[-1][1] == 2_999
