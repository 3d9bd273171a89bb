"""Files of jobs that a person edits before they are submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.engines import slurm
from diloco_cli.engines.files import edited, write_job_files
from diloco_cli.errors import NotFoundError, RefusedError, UsageError
from tests.unit.engines.test_slurm import IOWA, SYNCER
from tests.unit.engines.test_ssh import IOWA as BY_SSH

PLAN = "blake3-ab"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(slurm, "tool_directory", lambda name: Path("/opt/slurm/bin"))
    monkeypatch.setattr(slurm, "counts_memory", lambda place, via: True)
    assert write_job_files(tmp_path / "jobs", [IOWA, SYNCER], PLAN) == [
        tmp_path / "jobs" / name for name in ("iowa.slurm", "syncer-0.slurm")
    ]
    return tmp_path / "jobs"


def change(folder: Path, old: str, new: str) -> None:
    text = (folder / "iowa.slurm").read_text()
    assert old in text
    (folder / "iowa.slurm").write_text(text.replace(old, new))


def test_a_file_may_be_edited_where_its_run_does_not_depend_on_it(folder: Path) -> None:
    assert "KEY" not in (folder / "syncer-0.slurm").read_text(), "nothing of a secret stands in it"
    assert edited(folder, IOWA, PLAN).text == (folder / "iowa.slurm").read_text()
    change(folder, "#SBATCH --partition=h100\n", "#SBATCH --partition=a100\n#SBATCH --account=us\n")
    change(folder, "#SBATCH --gpus-per-node=8\n", "#SBATCH --gres=gpu:a100:8\n")
    change(folder, "exec ", "module load cuda\nexec ")
    text = edited(folder, IOWA, PLAN).text
    assert text is not None and "a100" in text and "module load" in text
    with pytest.raises(RefusedError, match=r"\.slurm exists, and may have been edited"):
        write_job_files(folder, [SYNCER, IOWA], PLAN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--nodes=2", "--nodes=1"),
        ("#SBATCH --requeue\n", ""),
        (f"# of plan {PLAN}", "# of plan blake3-cd"),
        ("unit iowa", "unit rhine"),
        ("--comment=", "--x="),
    ],
)
def test_a_file_that_does_not_fit_the_plan_is_refused(folder: Path, old: str, new: str) -> None:
    change(folder, old, new)
    with pytest.raises(RefusedError, match="does not fit the run's plan: it lacks the line") as error:
        edited(folder, IOWA, PLAN)
    assert error.value.where == str(folder / "iowa.slurm")


def test_a_script_of_ssh_is_held_to_its_plan_and_its_command(tmp_path: Path) -> None:
    write_job_files(tmp_path, [BY_SSH], PLAN)
    edited(tmp_path, BY_SSH, PLAN)
    with pytest.raises(RefusedError, match="# of plan blake3-cd"):
        edited(tmp_path, BY_SSH, "blake3-cd")
    with pytest.raises(RefusedError, match=r"diloco unit iowa .*--allow-code"):
        edited(tmp_path, replace(BY_SSH, command=(*BY_SSH.command, "--allow-code", "x")), PLAN)


def test_a_file_of_another_plan_one_that_is_missing_and_one_that_is_no_text(folder: Path) -> None:
    with pytest.raises(RefusedError, match="# of plan blake3-cd"):
        edited(folder, IOWA, "blake3-cd")
    (folder / "syncer-0.slurm").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="cannot be read"):
        edited(folder, SYNCER, PLAN)
    (folder / "syncer-0.slurm").unlink()
    with pytest.raises(NotFoundError, match="has no file of syncer-0"):
        edited(folder, SYNCER, PLAN)
