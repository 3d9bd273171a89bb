"""The outer optimizers against the field's reference, and their sign."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from diloco_cli.config.settings import OuterSettings
from diloco_cli.methods import OUTER_OPTIMIZERS, arithmetic_of

SIZE, STEPS = 257, 20
Pair = tuple[Tensor, Tensor]


def deltas(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(STEPS)]


def reference(settings: OuterSettings, start: Tensor) -> list[Tensor]:
    parameter = torch.nn.Parameter(start.clone())
    nesterov = settings.name == "nesterov"
    optimizer = torch.optim.SGD(
        [parameter], lr=settings.lr, momentum=settings.momentum if nesterov else 0.0, nesterov=nesterov
    )
    path = []
    for delta in deltas(start.dtype):
        parameter.grad = delta
        optimizer.step()
        path.append(parameter.detach().clone())
    return path


def stepped(settings: OuterSettings, parameters: Tensor, buffer: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """New (parameters, momentum buffer); `delta` is kept."""
    moved, new_buffer = torch.empty_like(parameters), torch.empty_like(buffer)
    make(settings, (parameters, buffer), delta, (moved, new_buffer))
    return moved, new_buffer


def make(settings: OuterSettings, before: Pair, delta: Tensor, after: Pair) -> None:
    record = OUTER_OPTIMIZERS[settings.name]
    versions = [dict(zip(("parameters", *record.buffers), pair, strict=False)) for pair in (before, after)]
    arithmetic_of(record)(settings, versions[0], delta.clone(), versions[1])
    if not record.buffers:
        after[1].copy_(before[1])


def ours(settings: OuterSettings, start: Tensor) -> list[Tensor]:
    parameters, buffer, path = start, torch.zeros_like(start), []
    for delta in deltas(start.dtype):
        parameters, buffer = stepped(settings, parameters, buffer, delta)
        path.append(parameters)
    return path


def ulps(a: Tensor, b: Tensor) -> float:
    """Distance in units of the last place of the largest value on the way."""
    scale = torch.maximum(a.abs(), b.abs()).clamp(min=1.0)
    return float(((a - b).abs() / (scale * torch.finfo(a.dtype).eps)).max())


@pytest.mark.parametrize(
    ("name", "lr", "momentum"),
    [("nesterov", 0.7, 0.9), ("nesterov", 0.4, 0.5), ("nesterov", 1.0, 0.99), ("sgd", 0.7, 0.9)],
)
def test_every_step_stays_within_two_ulp_of_torch_in_float64(
    name: Literal["nesterov", "sgd"], lr: float, momentum: float
) -> None:
    settings, start = OuterSettings(name, lr, momentum), torch.ones(SIZE, dtype=torch.float64)
    for found, expected in zip(ours(settings, start), reference(settings, start), strict=True):
        assert ulps(found, expected) <= 2


def test_nesterov_equals_torch_bit_for_bit_on_dyadic_values() -> None:
    parameters, buffer = torch.tensor([1.0, -2.0]), torch.zeros(2)
    reference_parameter = torch.nn.Parameter(parameters.clone())
    optimizer = torch.optim.SGD([reference_parameter], lr=0.5, momentum=0.5, nesterov=True)
    for delta in (torch.tensor([0.5, 0.25]), torch.tensor([-1.0, 0.125])):
        parameters, buffer = stepped(OuterSettings("nesterov", 0.5, 0.5), parameters, buffer, delta)
        reference_parameter.grad = delta
        optimizer.step()
        assert torch.equal(parameters, reference_parameter.detach())


def test_by_hand() -> None:
    parameters, buffer = stepped(
        OuterSettings("nesterov", 0.5, 0.5), torch.tensor([8.0]), torch.tensor([2.0]), torch.tensor([4.0])
    )
    assert (float(buffer), float(parameters)) == (5.0, 8.0 - 0.5 * (4.0 + 0.5 * 5.0))


def test_what_was_before_stays_as_it_is() -> None:
    parameters, buffer = torch.ones(3), torch.ones(3)
    for name in ("sgd", "nesterov"):
        _, moved = stepped(OuterSettings(name), parameters, buffer, torch.ones(3))  # type: ignore[arg-type]
        moved.zero_()
        assert all(torch.equal(tensor, torch.ones(3)) for tensor in (parameters, buffer))


@pytest.mark.parametrize("name", ["sgd", "nesterov"])
def test_a_learner_that_goes_downhill_moves_theta_downhill(name: str) -> None:
    """The sign: delta is old minus new. On |x|^2 every outer step must come closer to 0."""
    theta, buffer = torch.tensor([3.0, -4.0]), torch.zeros(2)
    for _ in range(5):
        learner = theta - 0.1 * 2 * theta  # one inner step of gradient descent
        moved, buffer = stepped(OuterSettings(name, 0.7, 0.3), theta, buffer, theta - learner)  # type: ignore[arg-type]
        assert float(moved.norm()) < float(theta.norm())
        theta = moved


@pytest.mark.parametrize("name", ["sgd", "nesterov"])
def test_chunk_by_chunk_gives_the_same_bits_in_the_room_that_is_given(name: str) -> None:
    settings = OuterSettings(name, 0.7, 0.9)  # type: ignore[arg-type]
    parameters, buffer, delta = (t.clone() for t in deltas(torch.float32)[:3])
    expected = stepped(settings, parameters, buffer, delta)
    room = torch.empty(2, SIZE)
    for chunk in (slice(0, 100), slice(100, 256), slice(256, SIZE)):
        make(settings, (parameters[chunk], buffer[chunk]), delta[chunk], (room[0][chunk], room[1][chunk]))
    assert torch.equal(room[0], expected[0]) and torch.equal(room[1], expected[1])
