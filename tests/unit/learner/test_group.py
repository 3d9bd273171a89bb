"""The meeting of an island's ranks, where it fails: clear, and within a stated time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from diloco_cli.environment import environment_with
from diloco_cli.errors import UsageError
from diloco_cli.learner.group import _compare, _listening, join_group
from diloco_cli.learner.parent import RankPlace
from tests.unit.learner.test_parent import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
JOIN = """
import os, torch
torch.__version__ = os.environ.get("ANOTHER_TORCH") or torch.__version__
from diloco_cli.errors import DilocoError
from diloco_cli.learner.group import join_group
from diloco_cli.learner.parent import place_here
try:
    join_group(place_here(), torch.device("cpu"), float(os.environ.get("MEET_S", "1")))
except DilocoError as error:
    print(error.code, error)
"""


def joining(place: RankPlace, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", JOIN], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=environment_with(**place.environment(), **environment),
    )  # fmt: skip


def joined(place: RankPlace, **environment: str) -> str:
    return joining(place, **environment).communicate(timeout=90)[0]


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


def test_every_rank_refuses_an_island_of_several_versions(tmp_path: Path) -> None:
    places = [RankPlace(rank, 2, rank, 2, f"file://{tmp_path}/meet") for rank in range(2)]
    ranks = [joining(place, MEET_S="60", ANOTHER_TORCH="2.0.1" if place.rank else "") for place in places]
    for said in [rank.communicate(timeout=90)[0] for rank in ranks]:
        assert "usage rank 1 on " in said and " has torch 2.0.1, rank 0 on " in said


def test_ranks_that_would_do_unlike_parts_are_refused() -> None:
    stated = {0: {"part": "micro-batches of 8 tokens (ddp)", "host": "a"}, 1: {"part": "", "host": "b"}}
    _compare(stated)  # rank 1 does not know the island yet
    with pytest.raises(UsageError, match=r"rank 1 on b has part micro-batches of 4 tokens \(fsdp\), rank 0 on a has"):
        _compare(stated | {1: {"part": "micro-batches of 4 tokens (fsdp)", "host": "b"}})


def test_two_ranks_on_one_device_are_refused() -> None:
    stated = {rank: {"host": "box", "uuid": f"GPU-{rank}"} for rank in range(3)}
    _compare(stated)
    _compare(stated | {2: {"host": "other", "uuid": "GPU-0"}})
    with pytest.raises(UsageError, match="ranks 0 and 2 on box have the same device"):
        _compare(stated | {2: {"host": "box", "uuid": "GPU-0"}})


def test_ranks_that_torchrun_starts_again_do_not_meet_the_dead_ones() -> None:
    """On the one store of torchrun's agent, which outlives its ranks."""
    listening = _listening("127.0.0.1", 0)
    host, port = listening.getsockname()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    agent = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in range(2):
        # each node's agent counts its own failures alone
        counts = [{"TORCHELASTIC_RESTART_COUNT": str(attempt * rank), "MEET_S": "60"} for rank in range(2)]
        ranks = [joining(RankPlace(rank, 2, rank, 2, "env://"), **agent, **counts[rank]) for rank in range(2)]
        assert [rank.communicate(timeout=90)[0] for rank in ranks] == ["", ""]
    del store


def test_a_rank_0_that_dies_while_ranks_meet_is_said() -> None:
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    first, second = (joining(RankPlace(rank, 3, 0, 1, rendezvous), MEET_S="15") for rank in range(2))
    wait_until(lambda: any(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process(second.pid).net_connections()))
    first.kill()
    first.communicate()
    said = second.communicate(timeout=90)[0]
    lost = ("rank_lost another rank of the island was lost during the meeting", "try_again rank 1 of 3 cannot reach")
    assert said.startswith(lost), said


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
def test_an_address_may_be_one_of_ipv6() -> None:
    rendezvous = f"tcp://[::1]:{free_port()}"
    ranks = [joining(RankPlace(rank, 2, 0, 1, rendezvous), MEET_S="60") for rank in range(2)]
    assert [rank.communicate(timeout=90)[0] for rank in ranks] == ["", ""]


def test_who_waits_for_others_lives_and_may_stop(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def attend() -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        join_group(RankPlace(0, 2, 0, 2, f"file://{tmp_path}/meet"), torch.device("cpu"), 60.0, attend)


def test_a_device_without_a_group_is_refused() -> None:
    with pytest.raises(UsageError, match="ranks cannot work together on mps: cpu, cuda can"):
        join_group(RankPlace(0, 2, 0, 2, "env://"), torch.device("mps"))
