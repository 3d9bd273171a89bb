"""What no committed version holds comes from the constructor; parameters get memory only where that matters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from diloco_cli.config.settings import ModelSettings, RunSettings, TrainSettings
from diloco_cli.tasks.build import build_model, build_model_on_meta
from diloco_cli.training import sharding as module
from diloco_cli.training.sharding import _without_values, constructed
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


def test_modules_are_made_as_usual_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), module._parameters_on_meta():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta
