"""Saved moments of the inner optimizer: what is restored is what was saved, or nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco_cli.algorithm.payload import to_bytes
from diloco_cli.config.settings import InnerSettings
from diloco_cli.learner.inner import build_optimizer, inner_state, keeps_moments, restore_inner_state

Tensors = dict[str, torch.Tensor]


def model_in(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    optimizer.zero_grad()
    (model(x) ** 2).mean().backward()
    optimizer.step()


def trained(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, Tensors]:
    model = model_in(dtype)
    optimizer = build_optimizer(model, InnerSettings(lr=0.1))
    for seed in range(3):
        step(model, optimizer, seed)
    saved = inner_state(model, optimizer)
    assert saved is not None
    return model, optimizer, saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    model, optimizer, saved = trained(dtype)
    twin = model_in(dtype)
    twin.load_state_dict(model.state_dict())
    its_optimizer = build_optimizer(twin, InnerSettings(lr=0.1))
    assert restore_inner_state(twin, its_optimizer, to_bytes(saved))
    step(model, optimizer, 9)
    step(twin, its_optimizer, 9)
    close = torch.equal if dtype != torch.float64 else torch.allclose  # saved as float32
    assert all(close(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def poisoned(saved: Tensors, name: str, value: float) -> bytes:
    tensors = {key: tensor.clone() for key, tensor in saved.items()}
    next(tensor for key, tensor in tensors.items() if key.startswith(name)).view(-1)[0] = value
    return to_bytes(tensors)


@pytest.mark.parametrize(
    ("name", "value"),
    [("exp_avg.", float("nan")), ("exp_avg_sq.", float("inf")), ("exp_avg_sq.", -1.0), ("step", -1)],
)
def test_moments_that_no_optimizer_can_have_are_refused(name: str, value: float) -> None:
    model, _, saved = trained()
    optimizer = build_optimizer(model, InnerSettings())
    assert not restore_inner_state(model, optimizer, poisoned(saved, name, value))
    assert not optimizer.state


def test_other_bytes_are_refused() -> None:
    model, _, saved = trained()
    optimizer = build_optimizer(model, InnerSettings())
    assert not restore_inner_state(model, optimizer, to_bytes(saved)[:-1])
    assert not restore_inner_state(model, optimizer, b"")
    assert not optimizer.state


def test_plain_sgd_has_no_moments_to_lose() -> None:
    model = model_in(torch.float32)
    sgd, adamw = (build_optimizer(model, InnerSettings(name=name)) for name in ("sgd", "adamw"))  # type: ignore[arg-type]
    step(model, sgd, 0)
    assert inner_state(model, sgd) is None and not keeps_moments(sgd) and keeps_moments(adamw)
