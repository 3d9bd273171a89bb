"""Samples of the two studies. The full ones are commands, their results stand in README.md beside this file:
python -m tests.studies.kills --role ROLE --kills 200, python -m tests.studies.server_faults."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco_cli.config.settings import RetentionSettings
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import delta_key
from diloco_cli.protocol.log.wire import decode
from diloco_cli.runtime.processes import identify, identity_to_json, own_identity
from diloco_cli.tensors.codecs import codec
from tests.studies import kills
from tests.studies.kills import EVERYBODY, HEADER, Role, Study, ToyRun
from tests.studies.launched import NAME, LaunchedRun, run_file
from tests.studies.server_faults import HEADER as HEADER_OF_FAULTS
from tests.studies.server_faults import ServerFault, emulated, run_through, summary
from tests.studies.toy_process import float_payload
from tests.studies.toy_runs import integer_run
from tests.waiting import wait_until


@pytest.mark.parametrize("role", ["learner", "syncer", "all", "supervisor"])
def test_kill_9_at_random_instants_loses_and_repeats_nothing(role: Role) -> None:
    tally = Study(role, seed=7).kill(3)
    assert tally.violations == []
    assert tally.kills == 3 and len(tally.back_s) > 0 < tally.merges <= tally.applied
    assert tally.row(role).startswith(f"| {role} | 3 | ") and tally.row(role).endswith(" | 0 |")
    assert tally.row(role).count("|") == HEADER.partition("\n")[0].count("|")


def test_units_that_die_with_their_supervisor_or_get_a_double_are_noticed(tmp_path: Path) -> None:
    launched, child = LaunchedRun(tmp_path, run_file(1)), subprocess.Popen(["sleep", "60"])
    units = tmp_path / "home" / NAME / "units"
    units.mkdir(parents=True)
    try:
        identity = identify(child.pid, None)
        (units / "l0.json").write_text(json.dumps({"identity": identity_to_json(identity)}))
        launched.orphans = {"l0": identity}
        assert launched.failed() == []
        (units / "l0.json").write_text(json.dumps({"identity": identity_to_json(own_identity())}))
        assert launched.failed() == ["l0 was started twice"]
    finally:
        child.kill()
        child.wait()
    assert "l0 did not outlive its supervisor" in launched.failed()


@pytest.mark.parametrize(("violations", "status"), [([], 0), (["a commit vanished"], 1)])
def test_a_study_of_kills_says_by_its_exit_status_whether_anything_was_violated(
    violations: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kills.Study, "kill", lambda study, wanted: study.tally.violations.extend(violations))
    monkeypatch.setattr("sys.argv", ["kills", "--role", "all", "--seed", "3"])
    with pytest.raises(SystemExit) as left:
        kills.main()
    *_, said = capsys.readouterr().out.splitlines()
    assert left.value.code == status and said.startswith("| everybody at once, seed 3 | 0 | ")


def test_a_toy_learner_writes_what_the_codec_writes() -> None:
    assert float_payload(-3.0, 5) == codec("fp32").to_bytes(torch.full((5,), -3.0))


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
    damage, told = DAMAGE[kind]
    damage(killed)
    assert not study._is_sound(killed, before)
    assert told in " ".join(study.tally.violations)


def test_a_run_through_failing_servers_ends_with_its_tokens_and_verifies(tmp_path: Path) -> None:
    with emulated("gs") as bucket:
        row = run_through(bucket, "both", ServerFault({"503": 0.1, "lost_answer": 0.1}), 2, tmp_path)
    assert row.problems == []
    assert summary([row, replace(row, asked=row.asked * 100)]).endswith(" | 1 failed |")
    assert summary([row]).count("|") == HEADER_OF_FAULTS.partition("\n")[0].count("|")
    assert row.found.merges >= 2 and row.spoilt > 10
