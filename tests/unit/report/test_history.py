"""A log folded into series: bounded, complete, and the same whether it is read at once or bit by bit."""

from __future__ import annotations

from math import isnan

import pytest

from diloco_cli.report.history import (
    MAX_MARKS,
    MAX_POINTS,
    RESTART,
    CommitLine,
    Mark,
    RunHistory,
    rates,
    stretches,
)
from diloco_cli.report.history import MergedInput as In
from diloco_cli.report.history import MergedOutput as Out
from diloco_cli.report.table import csv_of
from diloco_cli.units import parse_time

PARAMETERS = (6, 4)


def at(s: float) -> str:
    return f"2026-01-01T{int(s // 3600):02d}:{int(s % 3600 // 60):02d}:{s % 60:06.3f}Z"


def begun() -> RunHistory:
    history = RunHistory("id", PARAMETERS)
    history.add(CommitLine("epoch_start", 0, 1, "", at(0)), "d0")
    return history


def merge(
    history: RunHistory, s: float, *names: str, incarnation: int = 1, tokens: int = 100, slot_s: float = 1.0
) -> None:
    inputs = tuple(In(name, incarnation, tokens, 7) for name in names)
    line = CommitLine("merge", history.n + 1, 1, "", at(s), inputs, (Out(history.n % 2),), alive=3, slot_s=slot_s)
    history.add(line, "d")


def test_tokens_are_counted_as_the_state_counts_them() -> None:
    history = begun()
    for second in range(1, 5):
        merge(history, second, "iowa", "rhine")
    assert history.token_parameters == 2 * 100 * (6 + 4) * 2 and history.tokens == 400
    assert {name: took.merges for name, took in history.learners.items()} == {"iowa": 4, "rhine": 4}
    assert history.learners["iowa"].payload_bytes == 28


def test_any_length_gives_a_bounded_number_of_points_and_loses_no_merge() -> None:
    history = begun()
    for number in range(5000):
        merge(history, number, "iowa", *(["rhine"] if number % 2 else []))
    assert len(history.bins) <= MAX_POINTS and history.width_s == 4.0
    assert sum(bin_.merges for bin_ in history.bins.values()) == 5000
    assert sum(bin_.by.get("rhine", 0) for bin_ in history.bins.values()) == 2500
    assert {bin_.fewest for bin_ in history.bins.values()} == {1}
    assert max(bin_.tokens for bin_ in history.bins.values()) == history.tokens
    assert len(csv_of(history).splitlines()) <= MAX_POINTS + 1


def test_a_pause_of_many_slots_is_an_outage_and_a_gap_in_the_curve() -> None:
    history = begun()
    for second in [*range(1, 100), *range(200, 300)]:
        merge(history, second, "iowa")
    assert history.outages == [(99.0, 200.0)]
    found = rates(history)
    assert any(isnan(rate) for s, rate in found if 110 < s < 190), "the line is broken there"
    assert not any(isnan(rate) for s, rate in found if s < 95 or s > 205)


def test_slow_slots_are_no_outages() -> None:
    history = begun()
    for number in range(50):
        merge(history, 60.0 * (number + 1), "iowa", slot_s=60.0)
    assert history.outages == [] and all(bin_.merges for _, _, bin_ in stretches(history, 240)[1:])


def test_a_higher_incarnation_is_a_restart_and_a_higher_epoch_a_takeover() -> None:
    history = begun()
    merge(history, 1, "iowa")
    merge(history, 2, "iowa", incarnation=3)
    history.add(CommitLine("epoch_start", 3, 2, "", at(3)), "d3")
    assert (history.learners["iowa"].restarts, history.takeovers) == (1, 1)
    assert [(mark.kind, mark.unit, mark.s) for mark in history.marks] == [(RESTART, "iowa", 2.0)]


def test_a_new_process_after_a_stop_is_no_restart_and_the_next_one_is() -> None:
    history = begun()
    merge(history, 1, "iowa")
    history.add(CommitLine("stop", 2, 1, "", at(2)), "d2")
    for second, incarnation, restarts in ((3, 2, 0), (4, 2, 0), (5, 3, 1)):
        merge(history, second, "iowa", incarnation=incarnation)
        assert history.learners["iowa"].restarts == restarts


def test_a_rollback_takes_tokens_and_losses_back() -> None:
    history = begun()
    for second in range(1, 5):
        merge(history, second, "iowa")
        history.add(CommitLine("eval", history.n + 1, 1, "", at(second), loss=2.0, tokens=history.tokens), "d")
    tokens = [point.tokens for point in history.losses]
    half = tokens[1]
    history.add(CommitLine("rollback", history.n + 1, 1, "", at(6), shares=(("iowa", half * sum(PARAMETERS)),)), "d")
    assert history.tokens == half and [point.tokens for point in history.losses] == tokens[:2]
    merge(history, 7, "iowa")
    assert not any(rate < 0 for _, rate in rates(history))


def test_a_storm_of_restarts_pushes_no_rarer_event_out() -> None:
    history = begun()
    history.mark(Mark(0.5, "stop", "syncer", "stopped"))
    for number in range(3 * MAX_MARKS):
        history.mark(Mark(float(number), RESTART, "iowa", "is back"))
    assert len(history.marks) <= MAX_MARKS and history.marks[0].kind == "stop"
    assert history.marks_left_out + len(history.marks) == 3 * MAX_MARKS + 1


@pytest.mark.parametrize("time", ["", "yesterday", "9999-99-99", "0001-01-01T00:00:00+23:59"])
def test_times_that_are_none_break_nothing(time: str) -> None:
    assert parse_time(time) is None
    history = begun()
    history.add(CommitLine("skip", 1, 1, "", time), "d1")
    assert history.skips == 1 and history.span_s == 0.0
