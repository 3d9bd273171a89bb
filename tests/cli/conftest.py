"""The command line in a subprocess, in an empty directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Diloco = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def diloco(tmp_path: Path) -> Diloco:
    """`diloco("plan", "x.yaml")` -> the finished process; both streams as text."""

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "diloco_cli", *words],
            cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run
