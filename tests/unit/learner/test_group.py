"""The meeting of an island's ranks, where it fails: clear, and within a stated time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco_cli.environment import environment_with
from diloco_cli.errors import UsageError
from diloco_cli.learner.group import _compare, join_group
from diloco_cli.learner.place import RankPlace
from tests.unit.learner.test_parent import free_port

ROOT = Path(__file__).resolve().parents[3]
JOIN = """
import torch
from diloco_cli.errors import DilocoError
from diloco_cli.learner.group import join_group
from diloco_cli.learner.place import place_here
try:
    join_group(place_here(), torch.device("cpu"), 1.0)
except DilocoError as error:
    print(error.code, error)
"""


def joined(place: RankPlace, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", JOIN], check=False, cwd=ROOT, capture_output=True, text=True, timeout=90,
        env=environment_with(**place.environment(), **environment),
    )  # fmt: skip
    return done.stdout


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    said = joined(RankPlace(1, 4, 1, 2, f"file://{tmp_path}/meet"))
    assert said.startswith("try_again ranks 0, 2, 3 of 4 did not come; rank 1 waited for them")


def test_a_rank_0_that_does_not_listen_is_named() -> None:
    port = free_port()
    for place, environment in (
        (RankPlace(1, 2, 0, 1, f"tcp://127.0.0.1:{port}"), {}),
        (RankPlace(1, 2, 0, 1, "env://"), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}),
    ):
        assert "try_again rank 1 of 2 cannot reach rank 0 at" in joined(place, **environment)


def test_an_environment_without_an_address_is_a_usage_error() -> None:
    assert "usage environment: " in joined(RankPlace(1, 2, 0, 1, "env://"), MASTER_ADDR="", MASTER_PORT="")


def test_ranks_with_other_versions_are_named() -> None:
    stated = {rank: {"torch": "2.13.0", "diloco": "1", "device": "cpu", "host": f"box{rank}"} for rank in range(3)}
    _compare(stated)
    with pytest.raises(UsageError, match=r"rank 2 on box2 has torch 2\.9\.1, rank 0 on box0 has 2\.13\.0"):
        _compare(stated | {2: stated[2] | {"torch": "2.9.1"}})


def test_a_device_without_a_group_is_refused() -> None:
    with pytest.raises(UsageError, match="ranks cannot work together on mps: cpu, cuda can"):
        join_group(RankPlace(0, 2, 0, 2, "env://"), torch.device("mps"))
