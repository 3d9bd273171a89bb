"""The command line as a process, in an empty directory of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from diloco_cli.cli import main
from tests.forked import ROOT, run_diloco

Diloco = Callable[..., "subprocess.CompletedProcess[str]"]


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit status of `diloco` within this process, where a test can change what it rests on."""
    monkeypatch.setattr(sys, "argv", ["diloco", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def copied(example: str, folder: Path) -> Path:
    """A copy of an example, as a user would have it."""
    shutil.copytree(ROOT / "examples" / example, folder, ignore=shutil.ignore_patterns("bucket", "__pycache__"))
    return folder


def edit(path: Path, old: str, new: str, most: int = -1) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, most))


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    return copied("quickstart", tmp_path / "q")


@pytest.fixture
def diloco(tmp_path: Path) -> Diloco:
    """`diloco("plan", "x.yaml")` -> the finished process; both streams as text."""
    return partial(run_diloco, folder=tmp_path)
