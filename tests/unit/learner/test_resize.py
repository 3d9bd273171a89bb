"""An island with another number of ranks than planned, and devices that are not there: refused before training."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.launch.new_run import layout_of
from diloco_cli.learner.group import as_resized, at_ranks, device_here
from diloco_cli.learner.parent import RankPlace
from diloco_cli.protocol.log.records import RunFormat
from tests.numerics.ranked import RankedCase
from tests.unit.training.test_micro_batch import settings_of

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
