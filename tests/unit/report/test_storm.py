"""A storm's figures come from the log alone, and PASS means that every hypothesis holds."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_cli.chaos.storm import Strike
from diloco_cli.faults import FaultRule, Scenario
from diloco_cli.report.history import Mark, RunHistory
from diloco_cli.report.storm import (
    NOT_STEADY,
    RecoverySpread,
    StormReport,
    awaited,
    recovered_s,
    spread,
    steady_merges,
    storm_report,
    storm_text,
)
from tests.unit.report.test_history import add, begun, merge

ALL = ("iowa", "ohio")


def struck(kind: str = "kill", target: str = "iowa", at_s: float = 100.0, **more: Any) -> Strike:
    return Strike(0, at_s, kind, target, True, True, True, "", at_s, at_s + 3.0, **more)


def lived() -> RunHistory:
    """A merge each second of two islands; iowa is away from 100 s to 110 s, everybody from 120 s to 125 s."""
    history = begun()
    for s in [*range(1, 120), *range(126, 160)]:
        names = ALL[1:] if 100 <= s < 110 else ALL
        merge(history, s, *names, incarnation=1 if s < 100 else 2, tokens=10)
    history.started_s = 0.0
    return history


def report(
    strikes: Sequence[Strike], *hypotheses: str, problem: str | None = "", state: str = "MERGING"
) -> StormReport:
    scenario = Scenario("x", 60.0, (FaultRule("kill", "iowa", at_s=10.0),), hypotheses=hypotheses)
    storm: Any = SimpleNamespace(scenario=scenario, seed=1, strikes=strikes, began_s=90.0, ended_s=150.0)
    return storm_report("nano", storm, lived(), [Mark(30.0, "chaos", "iowa", "")], 2, state, problem, 0.9)


def test_figures_of_a_storm() -> None:
    found = report([struck(), struck(target="syncer", at_s=120.5), struck(target="supervisor", at_s=130.0)])
    assert [fault.recovery_s for fault in found.faults] == [10.0, 5.5, None]
    assert [fault.back_s for fault in found.faults] == [3.0] * 3
    assert found.undisturbed_tokens_per_s == pytest.approx(10.0, abs=0.1), (
        "from the last fault before to the first of the storm"
    )
    assert found.tokens["merged"] == pytest.approx(395, abs=5) and found.tokens["lost"] == pytest.approx(105, abs=5)
    assert found.goodput == pytest.approx(0.79, abs=0.01)
    assert (found.longest_gap_s, found.healthy_gap_s) == (7.0, 1.0)
    assert found.recovery["merged_again_s"] == RecoverySpread(5.5, 10.0, 10.0)
    assert found.verdict == "PASS"


def test_the_cost_of_a_fault_is_what_was_merged_less_until_the_next_one() -> None:
    strikes = [struck(), struck(target="syncer", at_s=118.5), struck(target="ohio", at_s=118.5)]
    for number, strike in enumerate(strikes):
        strike.number = min(number, 1)
    found = report(strikes)
    costs = [fault.tokens_lost for fault in found.faults]
    assert costs[0] == pytest.approx(50, abs=10), "iowa's half of ten seconds"
    assert costs[1] == costs[2] == pytest.approx(30, abs=5), "six seconds of everybody's, an equal part of each"
    assert sum(map(int, filter(None, costs))) == pytest.approx(found.tokens["lost"], abs=10)
    assert "  dearest    #1 kill syncer, ohio " in storm_text(found)


def fleet(*stretches: tuple[int, int, tuple[str, ...]]) -> RunHistory:
    history = begun()
    for start, end, names in stretches:
        for s in range(start, end):
            merge(history, s, *names, tokens=10)
    history.started_s = 0.0
    return history


def test_what_a_storm_is_compared_with_is_steady() -> None:
    """Not the first rounds, nor those after a fault, nor those in which one is still away; rounds have two merges."""
    steady = fleet((1, 100, ALL))
    assert [merge.s for merge in steady_merges(steady, [], 100.0, 1000.0)][::94] == [5.0, 99.0]
    long = fleet((1, 1000, ALL))
    assert steady_merges(long, [], 1000.0, 50.0)[0].s == 400.0, "as long as the storm, or ten minutes"
    assert steady_merges(steady, [Mark(80.0, "chaos", "iowa", "")], 100.0, 1000.0)[0].s == 85.0
    assert steady_merges(steady, [Mark(92.0, "restarted", "iowa", "")], 100.0, 1000.0) == [], "too few since then"
    slow_start = fleet((1, 40, ALL[:1]), (40, 100, ALL))
    assert steady_merges(slow_start, [], 100.0, 1000.0)[0].s >= 30.0
    back_late = fleet((1, 95, ALL[:1]), (95, 100, ALL))
    assert not any(merge.s > 93.0 for merge in steady_merges(back_late, [], 90.0, 1000.0))
    assert steady_merges(fleet((1, 8, ALL)), [], 8.0, 1000.0) == []


def test_without_a_steady_stretch_there_is_no_goodput_and_the_report_says_why() -> None:
    found = report([struck(at_s=36.0)], "goodput >= 0.1")
    assert found.goodput is None and found.faults[0].tokens_lost is None
    assert found.hypotheses[-1].value == f"unknown: {NOT_STEADY}" and f"({NOT_STEADY})" in storm_text(found)


def test_a_unit_has_recovered_once_it_merges_with_its_next_process_or_after_its_pause() -> None:
    history = lived()
    assert recovered_s(struck("pause", at_s=98.0), history) == 12.0, "what it had sent before is no recovery"
    assert recovered_s(struck(target="syncer", at_s=120.5), history) == 5.5
    assert recovered_s(struck(at_s=140.0), history) is None
    late = begun()
    merge(late, 9.0, "iowa")
    late.started_s = 0.0
    assert recovered_s(struck(at_s=5.0), late) == 4.0, "it had merged nothing before"
    add(late, "epoch_start", 10.0, epoch=2)
    assert awaited([struck(at_s=5.0), struck(target="ohio", at_s=6.0)], late) == ["ohio"]


@pytest.mark.parametrize(
    ("strikes", "options", "failed"),
    [
        ([struck()], {}, []),
        ([], {}, ["faults happen"]),
        ([Strike(0, 1.0, "kill", "iowa", skipped="so")], {}, ["faults happen"]),
        ([Strike(0, 100.0, "kill", "iowa", True, False, True, "", 100.0, 101.0)], {}, ["faults happen"]),
        ([Strike(0, 100.0, "kill", "iowa", True, True, False, "", 100.0)], {}, ["units are back"]),
        ([struck(at_s=149.0)], {}, ["units merge again"]),
        ([struck(at_s=149.0)], {"state": "FINISHED"}, []),
        ([Strike(0, 100.0, "kill", "iowa", True, True, None, "", 100.0)], {"state": "FINISHED"}, []),
        ([Strike(0, 100.0, "kill", "iowa", True, True, None, "", 100.0)], {"state": "FAILED"}, ["units are back"]),
        ([struck(at_s=149.0)], {"state": "PAUSED"}, ["units merge again"]),
        ([struck(at_s=149.0)], {"state": "STOPPED"}, ["units merge again"]),
        ([struck()], {"problem": "commit 3 is missing"}, ["verify"]),
    ],
)
def test_what_every_storm_must_show(strikes: list[Strike], options: dict[str, Any], failed: list[str]) -> None:
    found = report(strikes, "verify", **options)
    assert [checked.text for checked in found.hypotheses if not checked.ok] == failed
    assert found.verdict == ("FAIL" if failed else "PASS")
    assert storm_text(found).splitlines()[0].startswith(found.verdict)


@pytest.mark.parametrize(
    ("text", "value", "ok"),
    [
        ("goodput >= 0.75", "", True),
        ("goodput >= 0.85", "", False),
        ("recovery_p95 <= 10 s", "10 s", True),
        ("recovery_p50 <= 9 s", "10 s", False),
        ("longest_gap <= 1 min", "7 s", True),
        ("tokens_lost <= 49", "", False),
        ("participation >= 0.5", "", True),
        ("loss <= 3", "unknown: no merge after a fault", False),
    ],
)
def test_a_hypothesis_bounds_a_figure(text: str, value: str, ok: bool) -> None:
    checked = report([struck()], text).hypotheses[-1]
    assert (checked.text, checked.ok) == (text, ok)
    assert not value or checked.value == value


def test_a_spread_is_of_values_that_were_seen() -> None:
    assert spread([]) == RecoverySpread(None, None, None)
    assert spread([4.0, 1.0, 2.0]) == RecoverySpread(2.0, 4.0, 4.0)
