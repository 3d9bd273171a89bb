"""The state of optimizers that a user brings: what is restored goes on as if nothing had happened, or nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco_cli.loop.states import keeps_nothing, restore_state, saved_state

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Sign of a mixed momentum (arXiv 2302.06675); counts its steps in a plain number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
            state["step"] = state.get("step", 0) + 1
            state["norm"] = float(momentum.norm()) / 3
            moved = momentum.lerp(parameter.grad, 0.1).sign_()
            parameter.add_(moved, alpha=-0.01 / state["step"] * (1 + state["norm"]))
            momentum.lerp_(parameter.grad, 0.01)


class FinerThanBf16(torch.optim.Optimizer):
    """Moments of more bits than its parameters have, and a counter in whole numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros(parameter.shape, dtype=torch.float32))
                count = state.setdefault("count", torch.full(parameter.shape, 256, dtype=torch.int32))
                parameter.sub_(mean.lerp_(parameter.grad.float(), 0.1) / count.add_(1))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not all(len(kept) == 2 for kept in self.state.values()):
            raise KeyError("count")


class PastKeeping(Lion):
    """Keeps what no tensor holds."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["past"] = ["a", "b"]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "AMSGrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "AdamW of one tensor": lambda m: torch.optim.AdamW([next(m.parameters())], lr=0.01),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "Lion": lambda m: Lion(m.parameters()),
}


def model_in(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(3, 5)]).to(dtype)


def step(model: nn.ModuleList, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """The last part is never used."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(model[0].weight.dtype)
    optimizer.zero_grad()
    (model[1](model[0](x)) ** 2).mean().backward()
    optimizer.step()


def saved_by(
    make: Make, dtype: torch.dtype = torch.float32
) -> tuple[nn.ModuleList, torch.optim.Optimizer, bytes | None]:
    model = model_in(dtype)
    optimizer = make(model)
    for seed in range(3):
        step(model, optimizer, seed)
    return model, optimizer, saved_state(model, optimizer)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_restored_optimizer_goes_on_bit_for_bit(make: Make) -> None:
    model, optimizer, saved = saved_by(make)
    twin = model_in()
    twin.load_state_dict(model.state_dict())
    its_optimizer = make(twin)
    assert saved is not None and restore_state(twin, its_optimizer, saved)
    for seed in (9, 10):
        step(model, optimizer, seed)
        step(twin, its_optimizer, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert saved_state(twin, its_optimizer) == saved_state(model, optimizer)


def test_what_has_another_type_than_its_parameter_keeps_it() -> None:
    model, _, saved = saved_by(lambda m: FinerThanBf16(m.parameters()), torch.bfloat16)
    fresh = FinerThanBf16(model.parameters())
    assert saved is not None and restore_state(model, fresh, saved)
    assert {value.dtype for kept in fresh.state.values() for value in kept.values()} == {torch.float32, torch.int32}
    assert saved_state(model, fresh) == saved


@pytest.mark.parametrize("now", OPTIMIZERS)
@pytest.mark.parametrize("before", OPTIMIZERS)
def test_the_state_of_another_kind_is_refused(before: str, now: str) -> None:
    model, _, saved = saved_by(OPTIMIZERS[before])
    fresh = OPTIMIZERS[now](model)
    assert saved is not None and restore_state(model, fresh, saved) is (before == now)
    assert before == now or not fresh.state
    step(model, fresh, 9)


def test_a_state_that_the_optimizer_refuses_changes_nothing() -> None:
    model, optimizer, _ = saved_by(lambda m: FinerThanBf16(m.parameters()))
    del optimizer.state[model[0].weight]["count"]
    saved, fresh = saved_state(model, optimizer), FinerThanBf16(model.parameters())
    assert saved is not None and not restore_state(model, fresh, saved) and not fresh.state


def test_groups_and_rates_are_those_of_the_loop() -> None:
    model, _, saved = saved_by(OPTIMIZERS["Adam"])
    fresh = torch.optim.Adam([{"params": [p]} for p in reversed(list(model.parameters()))], lr=0.5)
    assert saved is not None and restore_state(model, fresh, saved)
    assert [group["lr"] for group in fresh.param_groups] == [0.5] * 6
    assert fresh.state[model[0].bias]["exp_avg"].shape == (3,)


def test_what_is_more_than_tensors_and_numbers_is_not_saved() -> None:
    assert saved_by(lambda m: PastKeeping(m.parameters()))[2] is None
    plain = [torch.optim.SGD(model_in().parameters(), lr=0.1, momentum=momentum) for momentum in (0.0, 0.9)]
    assert [keeps_nothing(optimizer) for optimizer in plain] == [True, False]
    assert saved_state(model_in(), plain[0]) is None


@pytest.mark.parametrize("mend", [lambda data: data[:-1], lambda data: b"", lambda data: b"\xff" * len(data)])
def test_other_bytes_are_refused(mend: Callable[[bytes], bytes]) -> None:
    model, _, saved = saved_by(OPTIMIZERS["Adam"])
    fresh = OPTIMIZERS["Adam"](model)
    assert saved is not None and not restore_state(model, fresh, mend(saved)) and not fresh.state


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    model, optimizer, _ = saved_by(OPTIMIZERS["Adam"])
    optimizer.state[model[0].weight]["exp_avg"][0, 0] = value
    saved, fresh = saved_state(model, optimizer), OPTIMIZERS["Adam"](model)
    assert saved is not None and not restore_state(model, fresh, saved) and not fresh.state


def test_another_models_state_is_refused() -> None:
    saved = saved_by(OPTIMIZERS["Adam"])[2]
    other = nn.Sequential(nn.Linear(2, 2))
    assert saved is not None and not restore_state(other, OPTIMIZERS["Adam"](other), saved)
