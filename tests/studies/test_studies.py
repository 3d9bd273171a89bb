"""Samples of the studies. The full ones are commands; README.md beside this file has their results."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import RetentionSettings
from diloco_cli.protocol.log.commits import Commit, Merge
from diloco_cli.protocol.log.keys import delta_key
from diloco_cli.protocol.log.records import FragmentVersion, MergedOffer, decode
from diloco_cli.runtime.processes import identify, own_identity
from tests.studies import attendance, damage, gaps, kills, storms
from tests.studies.attendance import CASES, INVENTORY, QUICKSTART, AttendanceRow, line, misses
from tests.studies.gaps import max_gap_s
from tests.studies.kills import EVERYBODY, Role, Study, ToyRun
from tests.studies.launched import NAME, LaunchedRun, run_file
from tests.studies.paced import SHAPES
from tests.studies.situations import SAMPLE, staged
from tests.studies.toy_process import integer_run
from tests.studies.walk import delta_walk, launch_walk
from tests.waiting import wait_until


@pytest.mark.parametrize(
    "role", [pytest.param(role, marks=pytest.mark.long) for role in ("learner", "syncer", "supervisor")] + ["all"]
)
def test_kill_9_at_random_instants_loses_and_repeats_nothing(role: Role) -> None:
    tally = Study(role, seed=7, bad_reads=0.05).kill(2)
    assert tally.violations == []
    assert tally.kills == 2 and len(tally.back_s) > 0 < tally.merges <= tally.applied
    assert tally.row(role).startswith(f"| {role} | 2 | ") and tally.row(role).endswith(" | 0 |")
    assert tally.row(role).count("|") == kills.HEADER.partition("\n")[0].count("|")


def test_units_that_die_with_their_supervisor_or_get_a_double_are_noticed(tmp_path: Path) -> None:
    launched, child = LaunchedRun(tmp_path, run_file(1)), subprocess.Popen(["sleep", "60"])
    units = tmp_path / "home" / "runs" / f"{NAME}-0" / "units"
    units.mkdir(parents=True)
    try:
        identity = identify(child.pid, None)
        (units / "l0.json").write_text(json.dumps({"identity": asdict(identity)}))
        launched.orphans = {"l0": identity}
        assert launched.failed() == []
        (units / "l0.json").write_text(json.dumps({"identity": asdict(own_identity())}))
        assert launched.failed() == ["l0 was started twice"]
    finally:
        child.kill()
        child.wait()
    assert "l0 did not outlive its supervisor" in launched.failed()


@pytest.mark.parametrize("name", SHAPES)
def test_a_paced_shape_is_planned_from_the_speeds_of_its_steps(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    (tmp_path / "run.yaml").write_text(shape.run_file())
    (tmp_path / "inventory.yaml").write_text(shape.inventory())
    run = load_run(tmp_path / "run.yaml")
    islands = load_inventory(tmp_path / "inventory.yaml").islands
    assert [island.tokens_per_s for island in islands] == pytest.approx([80 / factor for factor in shape.factors])
    assert run.data.args["factors"] == list(shape.factors) and run.train.tokens > 0


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A toy run that was killed as a whole after some merges."""
    toy = ToyRun(tmp_path_factory.mktemp("killed"), integer_run(100, 0.02, RetentionSettings("all")))
    try:
        toy.start(*EVERYBODY)
        wait_until(lambda: len(toy.log()) >= 8)
    finally:
        toy.kill(*toy.processes)
    return toy


@pytest.fixture
def killed(killed_once: ToyRun, tmp_path: Path) -> ToyRun:
    """A copy of it."""
    shutil.copytree(killed_once.directory, tmp_path, dirs_exist_ok=True)
    return ToyRun(tmp_path, killed_once.run)


def newest(toy: ToyRun, kind: str) -> Path:
    return sorted(path for path in (toy.bucket / kind).rglob("*") if path.is_file())[-1]


def first_delta(toy: ToyRun) -> Path:
    """Of the first merge, by the log's own words."""
    commits = [decode(Commit, data, name) for name, data in toy.log().items()]
    item = next(commit for commit in commits if commit.kind == "merge").inputs[0]
    return toy.bucket / delta_key(item.learner, item.incarnation, item.seq, item.payload_digest)


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


DAMAGE: dict[str, tuple[Callable[[ToyRun], None], str]] = {
    "a commit is gone": (lambda toy: newest(toy, "commit").unlink(), "changed or vanished"),
    "a commit is another": (lambda toy: spoil(newest(toy, "commit")), "changed or vanished"),
    "a merged delta is gone": (lambda toy: first_delta(toy).unlink(), "missing: delta"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_study_of_kills_notices(killed: ToyRun, kind: str) -> None:
    study, before = Study("all", seed=0), killed.log()
    assert study._is_sound(killed, before)
    harm, told = DAMAGE[kind]
    harm(killed)
    assert not study._is_sound(killed, before)
    assert told in " ".join(study.tally.violations)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchedRun, "forking", True)


@pytest.mark.usefixtures("forking")
def test_a_harmed_object_holds_up_no_merge_and_a_commit_comes_back() -> None:
    with damage.stored("folder", "unsigned", damage.ROUNDS) as (launched, objects, url):
        found = damage.harm(launched, objects, url, newest=1)
    assert found.violations == [] and found.kinds.total() == len(damage.DAMAGE) == len(found.took_s)


ROW = AttendanceRow(merges=160, participation=0.98, slot=1.0, merged=0.95)


def test_the_median_of_the_runs_is_held_against_the_bounds() -> None:
    worse = replace(ROW, participation=0.9, merged=0.5)
    assert not misses("near", [ROW, worse, ROW]) and misses("near", [ROW, worse, worse])
    assert not misses("slow-4", [ROW, worse, ROW]) and misses("slow-24", [worse])
    assert misses(QUICKSTART, [worse]) and not misses(QUICKSTART, [replace(ROW, participation=0.94)])
    text = line("near", [ROW, worse, ROW])
    assert text.count("|") == attendance.HEADER.partition("\n")[0].count("|") and "0.980 (0.980, 0.900, 0.980)" in text


@pytest.mark.long
def test_three_islands_take_part_in_nearly_every_merge() -> None:
    row = attendance.study(replace(CASES["near"], merges=24).run_file(), INVENTORY)
    assert row.merges >= 24 and row.participation > 0.8


def merge(at_s: float, *learners: str) -> Commit:
    inputs = tuple(MergedOffer(name, 1, 0, 0, 0, 0, 0, 0, 1.0, "", 0, norm=1.0) for name in learners)
    time = datetime.fromtimestamp(at_s, UTC).isoformat()
    return Merge(slot=0, time=time, inputs=inputs, outputs=(FragmentVersion(0, 0, 0, 1, "", ""),))


def test_a_gap_lies_between_two_merges_of_one_learner_once_all_have_taken_part() -> None:
    everybody = ("l0", "l1", "l2")
    log = [merge(0, "l0"), merge(60, *everybody), merge(61, "l0", "l1"), merge(64, "l0"), merge(65, *everybody)]
    assert [max_gap_s(log, (name,)) for name in everybody] == [3.0, 4.0, 5.0]
    assert max_gap_s(log, everybody) == 5.0
    assert max_gap_s(log[:1], everybody) == 0.0


@pytest.mark.long
def test_a_killed_learner_costs_a_gap_and_nothing_else() -> None:
    row = gaps.study("rebase", gaps.FAULTS[1], rounds=4)
    assert row.violations == [] and row.gap_s > 0
    assert row.text(1.0).count("|") == gaps.HEADER.partition("\n")[0].count("|")


def test_a_delta_passes_the_loop_the_decision_and_the_merge() -> None:
    passed = delta_walk()
    actors = {f"diloco_cli.protocol.actors.{name}" for name in ("learner", "syncer", "inbox", "merging")}
    assert actors | {"diloco_cli.protocol.rules.quorum", "diloco_cli.tensors.merge"} <= passed
    assert not any(name.startswith(("diloco_cli.cli", "diloco_cli.plan")) for name in passed)


@pytest.mark.long
def test_a_launch_passes_the_plan_and_ends_before_anything_trains() -> None:
    passed = launch_walk()
    assert {"diloco_cli.cli.launch", "diloco_cli.plan.planner", "diloco_cli.runtime.units"} <= passed
    of_daemons = {name for name in passed if name.startswith(("diloco_cli.learner", "diloco_cli.syncer"))}
    assert of_daemons == {"diloco_cli.syncer.operator"}, "which withdraws a stop request"


@pytest.mark.usefixtures("forking")
def test_a_run_that_is_well_hangs_or_is_stopped_is_told_apart_in_time() -> None:
    assert staged(SAMPLE) == []


@pytest.mark.long
@pytest.mark.parametrize("planted", ["nothing", "damage"])
def test_a_storm_is_survived_and_a_planted_fault_is_not(planted: storms.Planted) -> None:
    row = storms.study(1, 60.0, planted)
    assert row.wrong == [], row.text()
    assert row.count("injected") > 0 and row.text().count("|") == storms.HEADER.partition("\n")[0].count("|")
