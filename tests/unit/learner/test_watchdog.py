"""Which ranks hang, by what they have counted and when."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_cli.learner.parent import FIRST_S, LEAST_S, STEP_TIMES, RankCount, Watchdog


def seen(watchdog: Watchdog, counts: Sequence[RankCount], from_s: float, to_s: float) -> dict[int, float]:
    """Look every second with the same counts."""
    silent: dict[int, float] = {}
    for second in range(int(from_s), int(to_s) + 1):
        silent = watchdog.silent(counts, float(second))
    return silent


def stepping(step_s: int, steps: int, ranks: int = 2) -> tuple[Watchdog, list[RankCount]]:
    """A watchdog that has seen so many steps of all ranks."""
    watchdog, counts = Watchdog(ranks, 0.0), [RankCount()] * ranks
    for second in range(step_s * steps + 1):
        counts = [RankCount(second // step_s, second // step_s)] * ranks
        assert watchdog.silent(counts, float(second)) == {}
    return watchdog, counts


def test_the_first_step_may_take_long() -> None:
    watchdog = Watchdog(2, 0.0)
    assert seen(watchdog, [RankCount(), RankCount()], 1, FIRST_S) == {}
    assert set(seen(watchdog, [RankCount(), RankCount()], FIRST_S + 1, FIRST_S + 1)) == {0, 1}


def test_silence_for_ten_step_times_is_a_hang() -> None:
    watchdog, counts = stepping(step_s=7, steps=6)
    last_s = 7 * 6
    assert seen(watchdog, counts, last_s, last_s + 7 * STEP_TIMES) == {}
    assert seen(watchdog, counts, last_s + 7 * STEP_TIMES + 1, last_s + 7 * STEP_TIMES + 1) == {0: 71.0, 1: 71.0}


def test_fast_steps_have_a_least_patience() -> None:
    watchdog, counts = stepping(step_s=1, steps=10)
    assert seen(watchdog, counts, 10, 10 + LEAST_S) == {}
    assert seen(watchdog, counts, 10 + LEAST_S + 1, 10 + LEAST_S + 1) != {}


def test_a_wait_is_a_sign_of_life() -> None:
    watchdog, _ = stepping(step_s=1, steps=10)
    for second in range(10, 200):
        assert watchdog.silent([RankCount(second, 10), RankCount(second, 10)], float(second)) == {}


def test_a_wait_with_many_signs_of_life_does_not_shorten_the_patience() -> None:
    watchdog, _ = stepping(step_s=60, steps=5)
    for tenth in range(40):  # a wait of 4 s
        assert watchdog.silent([RankCount(6 + tenth, 5)] * 2, 300 + tenth / 10) == {}
    assert seen(watchdog, [RankCount(45, 5)] * 2, 305, 305 + 60 * STEP_TIMES - 10) == {}


def test_the_rank_that_stepped_least_is_behind() -> None:
    watchdog, _ = stepping(step_s=1, steps=10, ranks=3)
    seen(watchdog, [RankCount(11, 11), RankCount(10, 10), RankCount(11, 11)], 11, 12)
    assert watchdog.behind() == [1]
    seen(watchdog, [RankCount(11, 11)] * 3, 13, 13)
    assert watchdog.behind() == []


def test_its_own_pause_is_no_silence_of_the_ranks() -> None:
    watchdog, counts = stepping(step_s=1, steps=10)
    assert watchdog.silent(counts, 10_000.0) == {}
    assert seen(watchdog, counts, 10_001, 10_000 + LEAST_S) == {}
