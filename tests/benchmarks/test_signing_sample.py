"""A sample of the signing benchmark: both runs can be read, and only the signed one asks for `cryptography`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import signing
from tests.benchmarks.measure import ROOT


def test_both_runs_are_read_to_their_end_and_only_the_signed_one_imports_cryptography(tmp_path: Path) -> None:
    for name in ("signed", "plain"):
        folder = signing.trained(tmp_path / name, name == "signed", merges=8)
        command = [sys.executable, "-X", "importtime", "-m", "diloco_cli", "status", f"file://{folder}"]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        assert "FINISHED" in done.stdout
        assert ("cryptography" in done.stderr) == (name == "signed")


@pytest.mark.parametrize("size", signing.SIZES.values(), ids=signing.SIZES)
def test_what_is_timed_is_signed_and_checked(size: int) -> None:
    to_sign, to_check = signing.times_ms(size, rounds=1)
    assert min(*to_sign, *to_check) > 0
