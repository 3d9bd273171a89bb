"""What no committed version holds comes from the constructor; parameters get memory only where that matters.

Which rank has what of a fragment: everything once, at its place, and no padding.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from diloco_cli.config.settings import ModelSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.layout import Layout, ParameterFact, make_layout
from diloco_cli.tasks.build import build_model, build_model_on_meta
from diloco_cli.tensors.flat import flatten
from diloco_cli.tensors.merge import delta_formats
from diloco_cli.training import sharding as module
from diloco_cli.training.ranks import rank_batches
from diloco_cli.training.sharding import _without_values, constructed, extents_of, rows_of
from tests.unit.tasks.test_huggingface import CONFIGS, needs_transformers, run_in


class Buffers(nn.Module):
    """`kind`: where its buffer comes from."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        values = {
            "constant": lambda: torch.tensor([1.0, float("nan")]),
            "chance": lambda: torch.rand(2) > 0.5,
            "parameter": lambda: self.linear.weight.detach()[0] * 2,
            "its item": lambda: torch.tensor(self.linear.weight.sum().item()),
        }
        self.register_buffer("own", values[kind]())


@pytest.fixture
def users_module(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType("users_module")
    made.build = Buffers
    monkeypatch.setitem(sys.modules, "users_module", made)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the parameters of each model that is built hold."""
    found: list[int] = []

    def build(run: RunSettings) -> nn.Module:
        model = build_model(run)
        found.append(sum(p.nbytes for p in model.parameters() if not p.is_meta))
        return model

    monkeypatch.setattr(module, "build_model", build)
    return found


def run_of(model: ModelSettings) -> RunSettings:
    return RunSettings("built", model=model, train=TrainSettings(seed=5))


@pytest.mark.usefixtures("users_module")
@pytest.mark.parametrize("kind", ["constant", "chance", "parameter", "its item"])
@pytest.mark.parametrize("name", ["own", "frozen"])
def test_tensors_are_those_of_the_whole_model(kind: str, name: str, sizes: list[int]) -> None:
    run = run_of(ModelSettings(entrypoint="users_module:build", args={"kind": kind}))
    (found,) = constructed(run, [("", name)], frozen=name == "frozen")
    expected = getattr(build_model(run), name)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert (sizes[-1] == 0) is (kind == "constant" and name == "own"), "parameters got memory, or should have"
    assert name == "own" or len(sizes) == 1, "only the whole model has them"


@needs_transformers
@pytest.mark.parametrize("kind", CONFIGS)
def test_models_of_transformers_are_built_without_their_parameters(tmp_path: Path, kind: str, sizes: list[int]) -> None:
    """Rotary frequencies, most of them."""
    run = run_in(tmp_path, kind)
    missing = _without_values(build_model_on_meta(run))
    found, whole = constructed(run, missing, frozen=False), build_model(run)
    for (place, name), tensor in zip(missing, found, strict=True):
        assert torch.equal(tensor, getattr(whole.get_submodule(place), name))
    assert (kind == "gpt2" or missing) and sizes == [0]


SHAPES = {"embedding": (37, 6), "a": (5, 4, 3), "norm": (3,), "b": (18, 7), "one": (1, 9), "none": (0, 4)}
SYNC = SyncSettings(fragments=4, codec="int4")


def layout() -> Layout:
    facts = [ParameterFact(name, shape, name == "embedding") for name, shape in SHAPES.items()]
    return make_layout(facts, SYNC)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_what_ranks_have_makes_the_fragment_and_the_payload_of_the_whole_tensors(ranks: int) -> None:
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    found = layout()
    shards = [
        {name: t[slice(*rows_of(t.shape[0], rank, ranks))].contiguous() for name, t in tensors.items()}
        for rank in range(ranks)
    ]
    for index, fragment in enumerate(found.fragments):
        flat = torch.full((fragment.num_parameters,), float("nan"))
        extents = [(rank, extent) for rank in range(ranks) for extent in extents_of(fragment, rank, ranks)]
        for rank, extent in extents:
            extent.of_fragment(flat).copy_(extent.of_shard(shards[rank]))
        assert sum(extent.size for _, extent in extents) == fragment.num_parameters
        expected = flatten(fragment, tensors)
        assert torch.equal(flat, expected)
        delta = delta_formats(found, SYNC)[index]
        assert delta.encode(flat) == delta.encode(expected)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_rows_are_those_that_torch_gives_a_rank(ranks: int) -> None:
    for rows in range(1, 20):
        sizes = [chunk.shape[0] for chunk in torch.empty(rows, 2).chunk(ranks)]
        own = [rows_of(rows, rank, ranks) for rank in range(ranks)]
        assert [end - first for first, end in own if first < end] == sizes


@pytest.mark.parametrize(("examples", "at_once", "ranks"), [(8, 2, 2), (10, 2, 4), (7, 1, 3), (4, None, 4), (5, 1, 4)])
def test_ranks_compute_every_example_once_in_as_many_passes(examples: int, at_once: int | None, ranks: int) -> None:
    batch = torch.arange(examples).view(-1, 1), torch.arange(examples).view(-1, 1)
    parts = [list(rank_batches(batch, examples, at_once, rank, ranks)) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in parts}) == 1
    counted = [row for of_rank in parts for (inputs, _), share in of_rank if share for row in inputs.flatten().tolist()]
    assert sorted(counted) == list(range(examples))
    assert sum(share for of_rank in parts for _, share in of_rank) == pytest.approx(1.0)
