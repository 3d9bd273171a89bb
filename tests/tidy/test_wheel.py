"""What `pip install` of the built wheel brings: the package, its data, and templates/."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_templates_and_the_device_catalogue_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.run(["git", "ls-files", "templates"], cwd=ROOT, capture_output=True, text=True, check=True)
    for template in tracked.stdout.split():
        assert f"diloco_cli/{template}" in names
    assert "diloco_cli/config/devices.yaml" in names
    assert {name.split("/")[0] for name in names} <= {"diloco_cli", next(n.split("/")[0] for n in names if "info" in n)}


def test_an_installed_wheel_writes_its_templates_and_plans_them(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows only the dependencies of this one."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    environment = {"PYTHONPATH": ":".join([str(site), *borrowed]), "PATH": "/usr/bin:/bin"}
    for words in (
        ["init", "fleet", "--for", "several"],
        ["plan", "fleet/inventory.yaml", "-f", "fleet/run.yaml", "--fast"],
    ):
        done = subprocess.run(
            [str(python), "-m", "diloco_cli", *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "feasible" in done.stdout
