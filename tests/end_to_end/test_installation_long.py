"""An environment of its own with the oldest packages that are allowed.

`pytest -m long tests/end_to_end/test_installation_long.py` needs a package index.
`.ci/run` tries the newest packages in the same way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = ROOT / "tests" / "constraints-oldest.txt"


def run(*words: str | Path, timeout_s: float) -> str:
    """What the command prints; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, timeout=timeout_s, check=False,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def make_environment(python: str, folder: Path) -> Path:
    """Its folder of commands, with the newest pip."""
    run(python, "-m", "venv", "--upgrade-deps", folder, timeout_s=300)
    return folder / "bin"


@pytest.mark.long
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the oldest torch and numpy have no build for this Python")
def test_the_oldest_allowed_packages_work_together(tmp_path: Path) -> None:
    """Ten to twenty minutes. On Linux the oldest torch brings CUDA: 2.8 GB to fetch, 6 GB on disk."""
    bin_folder = make_environment(sys.executable, tmp_path / "env")
    pip = [bin_folder / "python", "-m", "pip"]
    run(*pip, "install", "--build-constraint", OLDEST, "-c", OLDEST, ".[dev,hf]", timeout_s=1800)
    run(*pip, "check", timeout_s=60)
    installed = run(*pip, "freeze", timeout_s=60).lower().replace("_", "-").splitlines()
    wanted = OLDEST.read_text().lower().splitlines()[1:]
    assert {line for line in wanted if not line.startswith("hatchling")} <= set(installed)
    run(ROOT / "tests" / "installed.sh", bin_folder, timeout_s=600)
    run(bin_folder / "python", "-m", "pytest", "tests/unit", "tests/contract", timeout_s=1800)
