"""Scenarios are read strictly, and their timetables are the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.faults import (
    FAULTS,
    Constraints,
    FaultRule,
    Hypothesis,
    Scenario,
    Unit,
    find_scenario,
    hypothesis_of,
    load_scenario,
    timetable,
)
from diloco_cli.forecast.fleet import SimulatedFleet
from diloco_cli.paths import templates_directory

UNITS = (Unit("a", "west"), Unit("b", "east"), Unit("c", "east"), Unit("syncer", None))
HEAD = "version: 1\nname: x\nduration: 10 min\nfaults:\n"


def scenario(*faults: FaultRule, constraints: Constraints | None = None, warm_up_s: float = 0.0) -> Scenario:
    return Scenario("x", 600.0, faults, constraints=constraints or Constraints(), warm_up_s=warm_up_s)


@pytest.mark.parametrize("path", sorted((templates_directory() / "chaos").glob("*.yaml")), ids=lambda path: path.stem)
def test_built_in_scenarios_can_be_read_and_do_something(path: Path) -> None:
    found = load_scenario(path)
    assert found.name == path.stem
    assert any(not fault.skipped for fault in timetable(found, UNITS))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("- {kind: kil, target: a, at: 1 s}", "must be one of"),
        ("- {kind: kill, target: a}", "given: none"),
        ("- {kind: kill, target: a, at: 1 s, every: 2 s}", "given: at, every"),
        ("- {kind: pause, target: a, at: 1 s}", "needs 'for'"),
        ("- {kind: kill, target: a, at: 1 s, for: 2 s}", "leave out 'for'"),
        ("- {kind: slow, target: a, at: 1 s, for: 2 s}", "needs 'factor'"),
        ("- {kind: pause, target: a, at: 1 s, for: 2 s, revive_after: 1 s}", "that is for kill"),
        ("- {kind: kill, target: a, at: 7}", "no unit"),
        ("- {kind: kill, target: a, every: 0 s}", "above 0"),
        ("- {kind: kill, target: a, at: 1 s, forr: 2 s}", "unknown key 'forr'"),
        ("- {kind: kill, target: a, at: 11 min}", "at 660 s it never happens: the scenario ends at 600 s"),
        ("- {kind: kill, target: a, every: 11 min}", "its first time, 660 s, never comes"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(HEAD + f"  {line}\n")
    with pytest.raises(UsageError, match=message) as caught:
        load_scenario(path)
    assert caught.value.where == f"{path}:5"


def test_a_warm_up_longer_than_everything_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("version: 1\nname: x\nduration: 10 s\nwarm_up: 10 s\nfaults: []\n")
    with pytest.raises(UsageError, match="warm_up"):
        load_scenario(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("verify", Hypothesis("verify")),
        ("goodput >= 0.9", Hypothesis("goodput", True, 0.9)),
        ("recovery_p95 <= 2 min", Hypothesis("recovery_p95", False, 120.0)),
    ],
)
def test_a_hypothesis_is_a_figure_and_its_bound(text: str, found: Hypothesis) -> None:
    assert hypothesis_of(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("goodpuut >= 0.9", "verify, or one of goodput, participation, recovery_p50"),
        ("goodput > 0.9", "then >= or <=, a bound"),
        ("goodput", "then >= or <=, a bound"),
        ("goodput >= high", "'high' is no number"),
        ("goodput >= nan", "'nan' is no number"),
        ("recovery_p95 <= 30", "has no unit"),
    ],
)
def test_a_wrong_hypothesis_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"{HEAD}  - {{kind: kill, target: a, at: 1 s}}\nhypotheses:\n  - {text}\n")
    with pytest.raises(UsageError, match=message) as caught:
        load_scenario(path)
    assert caught.value.where == f"{path}:7"


def test_a_scenario_is_found_by_its_file_or_name_and_only_with_faults_that_can_be_done(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"{HEAD}  - {{kind: poison, target: a, at: 1 s}}\n")
    assert find_scenario(str(path)).name == "x" and find_scenario("blackout", ("kill",)).name == "blackout"
    with pytest.raises(
        UsageError, match=r"poison is not done to a living run \(the model.*\); what is: kill, p"
    ) as caught:
        find_scenario(str(path), ("kill", "pause"))
    assert caught.value.where == f"{path}:5" and "diloco simulate run" in str(caught.value.hint)
    with pytest.raises(NotFoundError, match="built in: blackout"):
        find_scenario("blackut")


def test_the_supervisor_is_struck_by_its_name_alone() -> None:
    rules = FaultRule("kill", "supervisor", at_s=1.0), FaultRule("kill", "all", at_s=2.0)
    assert [fault.targets for fault in timetable(scenario(*rules), UNITS)] == [
        ("supervisor",),
        ("a", "b", "c", "syncer"),
    ]


def test_times_are_those_that_were_written() -> None:
    once = FaultRule("kill", "a", at_s=30.0)
    often = FaultRule("pause", "b", every_s=200.0, for_s=5.0)
    made = timetable(scenario(once, often, warm_up_s=50.0), UNITS)
    assert [(fault.at_s, fault.targets) for fault in made] == [(30.0, ("a",)), (250.0, ("b",)), (450.0, ("b",))]


def test_poisson_times_have_their_mean_distance() -> None:
    rule = FaultRule("kill", "learners", poisson_s=10.0, revive_after_s=0.0)
    made = timetable(Scenario("x", 100_000.0, (rule,)), UNITS)
    assert len(made) == pytest.approx(10_000, rel=0.05)
    drawn = [sum(fault.targets == (name,) for fault in made) for name in ("a", "b", "c")]
    assert sum(drawn) == len(made) and min(drawn) > 0.9 * max(drawn)


def test_groups_and_regions_name_their_units() -> None:
    rules = [FaultRule("kill", target, at_s=1.0 + i) for i, target in enumerate(("all", "region:east", "syncer"))]
    made = timetable(scenario(*rules), UNITS)
    assert [fault.targets for fault in made] == [("a", "b", "c", "syncer"), ("b", "c"), ("syncer",)]
    drawn = {timetable(scenario(FaultRule("kill", "regions", at_s=1.0)), UNITS, seed)[0].targets for seed in range(9)}
    assert drawn == {("a",), ("b", "c")}
    with pytest.raises(
        UsageError, match="allowed: a, b, c, syncer, supervisor, learners, regions, all, region:east, region:west"
    ):
        timetable(scenario(FaultRule("kill", "d", at_s=1.0)), UNITS)


@pytest.mark.parametrize(
    ("constraints", "reason"),
    [
        (Constraints(protect=("b",)), "b is protected"),
        (Constraints(min_alive=2), "fewer than 2 learners"),
        (Constraints(max_concurrent=1), "more than 1 units"),
    ],
)
def test_constraints_skip_a_fault_and_say_why(constraints: Constraints, reason: str) -> None:
    first = FaultRule("kill", "a", at_s=10.0, revive_after_s=20.0)
    second = FaultRule("kill", "b", at_s=15.0, revive_after_s=20.0)
    later = FaultRule("kill", "c", at_s=100.0)
    made = timetable(scenario(first, second, later, constraints=constraints), UNITS)
    assert [bool(fault.skipped) for fault in made] == [False, True, False]
    assert reason in made[1].skipped and reason in made[1].describe()


def test_one_unit_is_left_alone_while_it_cools_down() -> None:
    rules = [FaultRule("kill", "a", at_s=at, revive_after_s=10.0) for at in (0.0, 15.0, 40.0)]
    made = timetable(scenario(*rules, constraints=Constraints(cooldown_s=10.0)), UNITS)
    assert [bool(fault.skipped) for fault in made] == [False, True, False]


def test_a_second_syncer_may_start_while_the_first_stands_still() -> None:
    pause = FaultRule("pause", "syncer", at_s=10.0, for_s=20.0)
    others = FaultRule("second-syncer", "syncer", at_s=15.0), FaultRule("kill", "syncer", at_s=20.0)
    made = timetable(scenario(pause, *others), UNITS)
    assert [bool(fault.skipped) for fault in made] == [False, False, True]


def test_the_timetable_depends_on_the_seed_and_on_nothing_else() -> None:
    storm = load_scenario(templates_directory() / "chaos" / "spot-storm.yaml")
    assert timetable(storm, UNITS) == timetable(storm, UNITS[::-1]) != timetable(storm, UNITS, seed=8)
    code = (
        "from diloco_cli.faults import *; from diloco_cli.faults import *\n"
        "from diloco_cli.paths import templates_directory\n"
        "units = (Unit('a', 'west'), Unit('b', 'east'), Unit('c', 'east'), Unit('syncer', None))\n"
        "story = load_scenario(templates_directory() / 'chaos' / 'spot-storm.yaml')\n"
        "print('\\n'.join(fault.describe() for fault in timetable(story, units)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "\n".join(fault.describe() for fault in timetable(storm, UNITS)).strip()


def test_each_fault_has_an_effect_in_a_simulated_run() -> None:
    for kind, record in FAULTS.items():
        assert record.doc
        assert hasattr(SimulatedFleet, f"_{kind.replace('-', '_')}")
