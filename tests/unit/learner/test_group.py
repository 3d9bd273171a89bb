"""The meeting of an island's ranks, where it fails: clear, and within a stated time.

An island with another number of ranks than planned, and devices that are not there: refused before training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from diloco_cli.errors import DilocoError, InfeasibleError, UsageError
from diloco_cli.launch.new_run import layout_of
from diloco_cli.learner.group import _compare, _listening, as_resized, at_ranks, device_here, join_group
from diloco_cli.learner.parent import RankPlace, place_here
from diloco_cli.protocol.log.records import RunFormat
from tests.forked import ForkedProcess
from tests.numerics.ranked import RankedCase
from tests.unit.learner.test_parent import free_port
from tests.unit.training.test_replica import settings_of

WITHIN_S = 90.0


def join_here(meet_s: float, torch_version: str | None) -> None:
    torch.__version__ = torch_version or torch.__version__
    try:
        join_group(place_here(), torch.device("cpu"), meet_s)  # type: ignore[arg-type]
        distributed.barrier()  # or one has left before another sees that they have met
    except DilocoError as error:
        print(error.code, error)


def joining(place: RankPlace, meet_s: float, torch_version: str | None = None, **environment: str) -> ForkedProcess:
    return ForkedProcess(join_here, meet_s, torch_version, **place.environment(), **environment)


def said_by(process: ForkedProcess) -> str:
    process.wait(WITHIN_S)
    return process.said()[0]


def joined(place: RankPlace, **environment: str) -> str:
    return said_by(joining(place, 1.0, **environment))


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


def test_every_rank_refuses_an_island_of_several_versions(tmp_path: Path) -> None:
    places = [RankPlace(rank, 2, rank, 2, f"file://{tmp_path}/meet") for rank in range(2)]
    ranks = [joining(place, 60.0, "2.0.1" if place.rank else None) for place in places]
    for said in map(said_by, ranks):
        assert "usage rank 1 on " in said and " has torch 2.0.1, rank 0 on " in said


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
        counts = [{"TORCHELASTIC_RESTART_COUNT": str(attempt * rank)} for rank in range(2)]
        ranks = [joining(RankPlace(rank, 2, rank, 2, "env://"), 60.0, **agent, **counts[rank]) for rank in range(2)]
        assert [said_by(rank) for rank in ranks] == ["", ""]
    del store


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
def test_an_address_may_be_one_of_ipv6() -> None:
    rendezvous = f"tcp://[::1]:{free_port()}"
    ranks = [joining(RankPlace(rank, 2, 0, 1, rendezvous), 60.0) for rank in range(2)]
    assert [said_by(rank) for rank in ranks] == ["", ""]


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


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def preset_run(batch_tokens: int, preset: str = "gpt-nano") -> RunFormat:
    run, settings = RankedCase("any").run(), settings_of(preset, "auto", batch_tokens)
    island = replace(run.islands[0], batch_tokens=batch_tokens, ranks=4, micro_batch_tokens=batch_tokens // 4)
    return replace(run, settings=settings, layout=layout_of(settings), islands=(island,))


def test_fewer_ranks_take_the_same_batch_in_larger_parts() -> None:
    run = preset_run(4096)
    planned = run.islands[0]
    found = {ranks: at_ranks(run, planned, ranks, CPU) for ranks in (4, 2, 1)}
    assert found[4] is planned
    assert [(found[n].micro_batch_tokens, found[n].sharding) for n in (2, 1)] == [(2048, "ddp"), (4096, "none")]
    assert {island.batch_tokens for island in found.values()} == {4096}
    said = as_resized(found[2], planned)
    assert said == "ranks 2, planned were 4: batches of 4,096 tokens as planned, in micro-batches of 2,048"


def test_more_ranks_than_examples_are_refused() -> None:
    run = preset_run(4 * 128)
    with pytest.raises(InfeasibleError, match=r"a batch of 4 sequences cannot be divided over 5 ranks") as error:
        at_ranks(run, run.islands[0], 5, CPU)
    assert error.value.hint == "--ranks 4 at most, or another run with larger batches"


def test_what_the_devices_memory_does_not_hold_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    has = SimpleNamespace(total_memory=5_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: has)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    run = preset_run(64 * 128)
    with pytest.raises(InfeasibleError, match=r"l0 does not fit 2 ranks: each needs .* GB \(fsdp") as error:
        at_ranks(run, run.islands[0], 2, CUDA)
    assert error.value.hint and error.value.hint.startswith("--ranks ")
    enough = int(error.value.hint.split()[1].rstrip(","))
    assert at_ranks(run, run.islands[0], enough, CUDA).sharding == "fsdp"


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"4 ranks on this machine need as many devices; torch sees 2"):
        device_here("cuda", RankPlace(0, 4, 0, 4, "file:///nowhere"))
    assert device_here("cuda", RankPlace(3, 4, 1, 2, "file:///nowhere")) == torch.device("cuda", 1)
