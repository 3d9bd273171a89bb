"""The optimizers without torch's compiler: the same bits, and the compiler stays away."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from diloco_cli.config.settings import InnerSettings
from diloco_cli.learner.inner import build_optimizer

STEPS = """
import sys
import torch
from diloco_cli.config.settings import InnerSettings
from diloco_cli.learner.inner import build_optimizer, clip_gradients

for name in ("adamw", "sgd"):
    model = torch.nn.Linear(3, 3)
    optimizer = build_optimizer(model, InnerSettings(name=name))
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(2, 3)).sum().backward()
        clip_gradients(model, 1.0)
        optimizer.step()
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


def test_nothing_of_the_compiler_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
    assert torch.is_grad_enabled()
