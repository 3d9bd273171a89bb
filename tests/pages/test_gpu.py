"""The script of examples/gpu ends on every machine, and says what it skips."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from examples.gpu import check
from tests.pages import ROOT
from tests.unit.training.test_devices import CudaDevice, run_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU: run examples/gpu/check.sh itself")
def test_without_a_gpu_each_check_says_that_it_is_skipped_and_why() -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [str(ROOT / "examples" / "gpu" / "check.sh")],
        check=True, capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 9 and all("skipped: torch" in line and "no CUDA device" in line for line in lines)


def test_what_its_checks_call_is_there() -> None:
    """On the CPU, with an accelerator that the test plays, and without the bounds."""
    device = CudaDevice(run_of(mixing="rebase"), "slow")
    assert 0 < check.away_share(device.run, device.training, device.wire) < 1
    assert check.planned_gb(check.settings_of(checkpointing=True)) < check.planned_gb(check.settings_of())
