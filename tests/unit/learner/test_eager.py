"""The optimizers without torch's compiler: the same bits, and the compiler stays away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from diloco_cli.config.settings import InnerSettings
from diloco_cli.learner.inner import build_optimizer

ROOT = Path(__file__).resolve().parents[3]
LIFE = """
import sys
import torch
from diloco_cli.tensors.payload import to_bytes
from diloco_cli.config.settings import InnerSettings
from diloco_cli.learner.inner import build_optimizer, inner_state, restore_inner_state
from tests.benchmarks.inner_step import replica_of

replica = replica_of("gpt-pico")
for optimizer in (replica.optimizer, build_optimizer(replica.model, InnerSettings(name="sgd"))):
    replica.optimizer = optimizer
    for _ in range(2):
        replica.step(0, 128, 1e-3)
    moments = inner_state(replica.model, optimizer)
    assert moments is None or restore_inner_state(replica.model, optimizer, to_bytes(moments))
    optimizer.load_state_dict(optimizer.state_dict())
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


def test_nothing_of_the_compiler_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", LIFE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_hooks_are_called_once_a_step_whatever_optimizers_there_were_before(name: str) -> None:
    calls: list[str] = []
    model = nn.Linear(2, 1)
    for build in (torch.optim.AdamW, torch.optim.SGD):
        build(nn.Linear(2, 1).parameters(), lr=0.1).step()
    optimizer = build_optimizer(model, InnerSettings(name=name))  # type: ignore[arg-type]
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_are_those_of_torch(name: str) -> None:
    settings = InnerSettings(name=name, lr=0.1, weight_decay=0.1)  # type: ignore[arg-type]
    ours, its = (nn.Linear(5, 3) for _ in range(2))
    its.load_state_dict(ours.state_dict())
    mine = build_optimizer(ours, settings)
    kind: type[torch.optim.Optimizer] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    groups = [
        {**group, "params": [part]} for group, part in zip(mine.param_groups, (its.weight, its.bias), strict=True)
    ]
    theirs = kind(groups)  # type: ignore[call-arg]
    for seed in range(4):
        inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
        for model, optimizer in ((ours, mine), (its, theirs)):
            optimizer.zero_grad()
            (model(inputs) ** 2).mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), its.parameters(), strict=True))
    states = [list(optimizer.state.values()) for optimizer in (mine, theirs)]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(*states, strict=True) for key in a if a[key] is not None)
    assert torch.is_grad_enabled()
