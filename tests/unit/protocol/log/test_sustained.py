"""The best pace that a run sustained, from its merges alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from diloco_cli.protocol.log import commits
from diloco_cli.protocol.log.records import FragmentVersion, MergedOffer
from diloco_cli.protocol.log.sustained import Sustained, share_of_best, sustained_after

START = datetime(2026, 1, 1, tzinfo=UTC)


def merge(at_s: float, tokens: int = 100) -> commits.Merge:
    return merge_at((START + timedelta(seconds=at_s)).isoformat(), tokens)


def merge_at(time: str, tokens: int = 100) -> commits.Merge:
    offer = MergedOffer("iowa", 1, 0, 0, 0, tokens, tokens, 1, 1.0, "", 0, norm=1.0)
    return commits.Merge(n=1, time=time, slot=0, inputs=(offer,), outputs=(FragmentVersion(0, 1, 0, 1, "", ""),))


def merged(known: Sustained, from_s: float, every_s: float, count: int, tokens: int = 100) -> Sustained:
    for i in range(count):
        known = sustained_after(known, merge(from_s + i * every_s, tokens))
    return known


def test_a_pace_held_for_five_windows_is_sustained() -> None:
    four = merged(Sustained(), 0.0, 1.0, 41)
    assert (four.rates, four.best) == ((100.0,) * 4, 0.0)
    assert merged(four, 41.0, 1.0, 10).best == 100.0


def test_windows_last_for_ten_merges_and_five_seconds() -> None:
    fast = merged(Sustained(), 0.0, 0.1, 52)
    assert fast.rates == (pytest.approx(1000.0),)
    slow = merged(Sustained(), 0.0, 60.0, 11)
    assert slow.last == (600.0, 1000)


def test_offers_that_piled_up_in_an_outage_do_not_make_the_best_pace() -> None:
    known = merged(Sustained(), 0.0, 1.0, 51)
    known = merged(known, 330.0, 0.1, 200)  # ten minutes of nothing, then twenty seconds of offers that had piled up
    known = merged(known, 350.0, 1.0, 30)
    assert known.best == 100.0


def test_a_new_syncer_a_stop_and_a_rollback_begin_anew_and_keep_the_best() -> None:
    known = merged(Sustained(), 0.0, 1.0, 56)
    stop = commits.Stop(n=1)
    assert sustained_after(known, stop) == Sustained(best=100.0)


def test_a_clock_that_goes_back_or_is_none_begins_anew() -> None:
    known = merged(Sustained(), 100.0, 1.0, 5)
    assert sustained_after(known, merge(0.0)).merges == 0
    assert sustained_after(known, merge_at("noon")).since == "noon"


def test_the_present_pace_counts_the_last_whole_window_and_the_present_one() -> None:
    known = merged(Sustained(), 0.0, 1.0, 51)
    assert share_of_best(known, 0.0) == pytest.approx(1.0)
    assert share_of_best(merged(known, 54.0, 4.0, 5), 20.0) == pytest.approx(0.5)
    assert share_of_best(Sustained(), 5.0) is None
