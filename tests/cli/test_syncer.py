"""`diloco syncer` and the settings of who serves: words, limits, and how little a standby loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Diloco

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "run.yaml"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "which run?"),
        (["file:///a", "--run", "file:///b"], "give its URL once"),
        (["file:///a", "--name", "x"], "add --standby"),
        (["file:///a", "--standby", "--name", "../x"], "must match"),
    ],
)
def test_wrong_words_are_told(diloco: Diloco, words: list[str], says: str) -> None:
    done = diloco("syncer", *words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_a_standby_of_no_run_says_so(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = diloco("syncer", f"file://{tmp_path}/empty", "--standby")
    assert done.returncode == 4 and "no run at" in done.stderr


def test_a_standby_loads_neither_torch_nor_numpy_before_it_serves() -> None:
    code = "import sys, diloco_cli.syncer.standby; print(sorted({'torch', 'numpy', 'fsspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
