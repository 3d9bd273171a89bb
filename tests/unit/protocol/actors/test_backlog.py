"""How much garbage waits: by what the last sweep found, with its trend."""

from __future__ import annotations

from diloco_cli.protocol.actors.collection import NOT_KNOWN, SAMPLE_EVERY_S, Backlog


def test_before_the_first_sweep_ends_only_what_it_has_found_is_known() -> None:
    """Nor is what it goes on to find a trend."""
    backlog = Backlog()
    for found in (0, 12, 40):
        said = backlog.at(50, deleted=7, found=found, now_s=found * SAMPLE_EVERY_S)
        assert (said.objects, said.commits, said.per_h) == (found, NOT_KNOWN, 0.0)
    backlog.swept_to(50, deleted=40)
    said = backlog.at(50, 40, 0, 99.0 * SAMPLE_EVERY_S)
    assert (said.objects, said.commits, said.per_h) == (0, 0, 0.0)


def test_a_backlog_is_what_so_many_commits_have_left_behind() -> None:
    backlog = Backlog()
    backlog.swept_to(50, deleted=9_999)  # all that earlier processes had left
    backlog.swept_to(60, deleted=40)
    found = backlog.at(75, deleted=0, found=0, now_s=0.0)
    assert (found.commits, found.objects) == (15, 60)
    assert backlog.at(75, deleted=20, found=25, now_s=1.0).objects == 40, "the sweep that goes on has deleted some"
    assert backlog.at(75, deleted=60, found=25, now_s=2.0).objects == 25, "what it has found is there"


def test_the_trend_is_that_of_the_last_minutes_and_a_saw_has_none() -> None:
    growing, saw = Backlog(), Backlog()
    for backlog in (growing, saw):
        backlog.swept_to(0, 0)
    for k in range(20):
        now_s = k * SAMPLE_EVERY_S
        rising = growing.at(0, 0, found=10 * k, now_s=now_s)
        teeth = saw.at(0, 0, found=100 * (k % 2), now_s=now_s)
    assert rising.per_h == 1200.0 and teeth.per_h == 0.0
    assert Backlog().at(0, 0, 5, 0.0).per_h == 0.0
