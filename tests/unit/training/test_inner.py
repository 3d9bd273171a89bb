"""The inner optimizer: its saved moments (what is restored is what was saved, or nothing), and its step.

The optimizers without torch's compiler: the same bits, and the compiler stays away.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from diloco_cli import methods
from diloco_cli.config.settings import InnerSettings
from diloco_cli.errors import RunFailedError, UsageError
from diloco_cli.tensors.payload import to_bytes
from diloco_cli.training import inner
from diloco_cli.training.inner import (
    autocast,
    build_optimizer,
    clip_gradients,
    finite_norm,
    learning_rate,
    make_step,
    moments_of,
    restore_inner_state,
    saved_moments,
    shared_out,
)

Tensors = dict[str, torch.Tensor]


def model_in(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, rows)) for rows in (4, 1))).to(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    optimizer.zero_grad()
    (model(x) ** 2).mean().backward()
    optimizer.step()


def trained(
    dtype: torch.dtype = torch.float32, name: str = "adamw"
) -> tuple[nn.Module, torch.optim.Optimizer, Tensors]:
    model = model_in(dtype)
    optimizer = build_optimizer(model, InnerSettings(name=name, lr=0.1))
    for seed in range(3):
        step(model, optimizer, seed)
    moments = moments_of(model, optimizer)
    assert moments is not None
    return model, optimizer, {name: tensor.clone() for name, tensor in moments.items()}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *[(dtype, "adamw") for dtype in (torch.float32, torch.bfloat16, torch.float64)],
        *[(dtype, "muon") for dtype in (torch.float32, torch.bfloat16)],
    ],
)
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype: torch.dtype, name: str) -> None:
    model, optimizer, saved = trained(dtype, name)
    twin = model_in(dtype)
    twin.load_state_dict(model.state_dict())
    its_optimizer = build_optimizer(twin, InnerSettings(name=name, lr=0.1))
    assert restore_inner_state(twin, its_optimizer, to_bytes(saved))
    step(model, optimizer, 9)
    step(twin, its_optimizer, 9)
    close = torch.equal if dtype != torch.float64 else torch.allclose  # saved as float32
    assert all(close(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


class Routed(nn.Module):
    """Experts of which each step uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 3)) for _ in range(3)])
        self.head = nn.Linear(3, 3)

    def step(self, optimizer: torch.optim.Optimizer, *used: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(sum(used)))
        torch.stack([(self.head(self.experts[index](x)) ** 2).mean() for index in used]).sum().backward()
        make_step(optimizer)


@pytest.mark.parametrize("used", [[(0,)], [(0,), (0, 1)], [(1,), (1, 2), (2,), (1,)]])
@pytest.mark.parametrize(("name", "fused"), [("adamw", True), ("adamw", False), ("muon", True)])
def test_moments_of_parameters_without_a_gradient_yet_are_zero_and_go_on_bit_for_bit(
    used: list[tuple[int, ...]], name: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rarely used expert has made fewer steps than the others, and is corrected for those."""
    monkeypatch.setattr(inner, "FUSED", ("cpu",) if fused else ())
    model, twin = Routed(), Routed()
    optimizer, its_optimizer = (build_optimizer(m, InnerSettings(name=name, lr=0.1)) for m in (model, twin))
    for experts in used:
        model.step(optimizer, *experts)
    saved = saved_moments(model, optimizer)
    assert saved is not None and saved.step == len(used)
    twin.load_state_dict(model.state_dict())
    assert restore_inner_state(twin, its_optimizer, saved.encode())
    for experts in ((0, 1, 2), (2,)):
        model.step(optimizer, *experts)
        twin.step(its_optimizer, *experts)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    again = saved_moments(twin, its_optimizer)
    assert again is not None and again.encode() == (saved_moments(model, optimizer) or again).encode()


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


# -- the step ---------------------------------------------------------------------------------------------------------


def test_matrices_and_embeddings_decay_and_vectors_do_not() -> None:
    """With a gradient of zero AdamW does nothing but decay: p <- p (1 - lr * decay)."""
    model = nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    optimizer = build_optimizer(model, InnerSettings(lr=0.5, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    left = {name: float(parameter.detach().flatten()[0]) for name, parameter in model.named_parameters()}
    decayed, kept = pytest.approx(2.0 * 0.95), 2.0
    assert left == {"0.weight": decayed, "1.weight": kept, "1.bias": kept, "2.weight": decayed, "2.bias": kept}


class Kinds(nn.Module):
    """Every kind of tensor: the head is tied to the embedding or a matrix of its own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.positions = nn.Embedding(12, 6), nn.Embedding(5, 6)
        self.conv, self.norm = nn.Conv1d(6, 6, 3, padding=1), nn.LayerNorm(6)
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(6, 24), "down": nn.Linear(24, 6, bias=False)})])
        self.head = nn.Linear(6, 12, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        x = x + self.conv(x.mT).mT
        found: torch.Tensor = self.head(x + self.blocks[0]["down"](self.blocks[0]["up"](self.norm(x)).relu()))
        return found


@pytest.mark.parametrize("tied", [True, False])
def test_muon_is_torchs_for_hidden_matrices_and_adamw_for_all_else_bit_for_bit(tied: bool) -> None:
    settings = InnerSettings(name="muon", lr=0.02, weight_decay=0.1)
    model, twin = Kinds(tied), Kinds(tied)
    hidden = [twin.blocks[0]["up"].weight, twin.blocks[0]["down"].weight]
    others = [p for p in twin.parameters() if not any(p is q for q in hidden)]
    theirs = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in others if p.dim() > 1], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        torch.optim.AdamW([p for p in others if p.dim() < 2], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    ours = build_optimizer(model, settings)
    assert shared_out(ours) == f"Muon: 2 matrices; AdamW: {len(others)} tensors"
    assert shared_out(build_optimizer(model, InnerSettings())) is None
    for seed in range(5):
        tokens = torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(seed))
        for each, optimizers in ((model, [ours]), (twin, theirs)):
            each.zero_grad()
            nn.functional.cross_entropy(each(tokens).flatten(0, 1), tokens.roll(1).flatten()).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4)), nn.Linear(4, 3), nn.Conv2d(1, 2, 3)]
)
def test_muon_is_refused_for_a_model_without_hidden_matrices(model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"train.inner.name: muon is for hidden matrices, and this model has none"):
        build_optimizer(model, InnerSettings(name="muon"))


def test_muon_is_refused_by_name_where_torch_is_older(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Kinds(True)
    monkeypatch.setattr(methods, "version", lambda package: "2.8.1+cu126")
    with pytest.raises(
        UsageError, match=r"train.inner.name: muon needs torch 2.9 or newer; here is torch 2.8.1\+cu126"
    ):
        build_optimizer(model, InnerSettings(name="muon"))
    build_optimizer(model, InnerSettings(name="adamw"))


def test_frozen_and_tied_parameters_are_in_no_group_or_in_one() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    groups = build_optimizer(model, InnerSettings()).param_groups
    assert [p is model[0].weight for group in groups for p in group["params"]] == [True]


def test_the_fused_kernel_steps_as_the_plain_formula() -> None:
    """AdamW (arXiv 1711.05101) written out in float64, three steps."""
    settings = InnerSettings(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95)
    start = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    model = nn.Linear(2, 2, bias=False)
    model.weight.data.copy_(start)
    optimizer = build_optimizer(model, settings)
    p, m, v = start.double(), torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
    for t, scale in enumerate((1.0, -0.5, 2.0), start=1):
        gradient = scale * torch.tensor([[0.3, -0.1], [0.0, 1.0]])
        model.weight.grad = gradient.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        p = p * (1 - 0.01 * 0.1) - 0.01 * step
    torch.testing.assert_close(model.weight.detach().double(), p, rtol=1e-6, atol=1e-7)


def with_gradients(*values: float) -> nn.Module:
    model = nn.Linear(len(values), 1, bias=False)
    model.weight.grad = torch.tensor([values])
    return model


def test_gradients_are_scaled_to_the_bound_and_the_norm_before_is_told() -> None:
    model = with_gradients(3.0, 4.0)
    assert float(clip_gradients(model, 1.0)) == pytest.approx(5.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.8]]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clip_norm", [0.0, 10.0])
def test_gradients_below_the_bound_or_without_one_stay(clip_norm: float) -> None:
    model = with_gradients(3.0, 4.0)
    assert float(clip_gradients(model, clip_norm)) == pytest.approx(5.0)
    assert torch.equal(model.weight.grad, torch.tensor([[3.0, 4.0]]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_gradients_that_are_not_finite_never_reach_the_optimizer(value: float, clip_norm: float) -> None:
    with pytest.raises(RunFailedError, match="norm of the gradients is"):
        finite_norm(clip_gradients(with_gradients(1.0, value), clip_norm))


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_auto_is_bf16_where_cuda_has_it_and_fp32_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda, mps = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert [type(autocast("auto", device)) for device in (cpu, mps)] == [nullcontext, nullcontext]
    found = autocast("auto", cuda)
    assert isinstance(found, torch.autocast) and (found.device, found.fast_dtype) == ("cuda", torch.bfloat16)
    assert isinstance(autocast("bf16", cpu), torch.autocast) and isinstance(autocast("fp32", cuda), nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert isinstance(autocast("auto", cuda), nullcontext)


ROOT = Path(__file__).resolve().parents[3]
LIFE = """
import sys
import torch
import diloco_cli.learner.daemon
from diloco_cli.config.settings import DataSettings, InnerSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.tasks.build import build_data, build_model, build_model_on_meta
from diloco_cli.training.inner import build_optimizer, restore_inner_state, saved_moments
from diloco_cli.training.replica import Replica

model, data = ModelSettings(preset="gpt-pico"), DataSettings(preset="python-stdlib")
run = RunSettings(name="r", model=model, data=data, train=TrainSettings(batch_tokens=1024))
replica = Replica(run, build_model(run), build_data(run), 0, 1)
assert all(parameter.is_meta for parameter in build_model_on_meta(replica.settings).parameters())
for optimizer in (build_optimizer(replica.model, InnerSettings(name=name)) for name in ("adamw", "sgd", "muon")):
    replica.optimizer = optimizer
    for _ in range(2):
        replica.step(0, 128, 1e-3)
    moments = saved_moments(replica.model, optimizer)
    assert moments is None or restore_inner_state(replica.model, optimizer, moments.encode())
    optimizer.load_state_dict(optimizer.state_dict())
print([name for name in ("torch._dynamo", "torch._inductor", "torch.distributed.tensor") if name in sys.modules])
"""


def test_a_launch_and_a_learner_of_one_device_import_neither_the_compiler_nor_sharded_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", LIFE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_hooks_are_called_once_a_step_whatever_optimizers_there_were_before(name: str) -> None:
    calls: list[str] = []
    model = model_in(torch.float32)
    for build in (torch.optim.AdamW, torch.optim.SGD):
        build(nn.Linear(2, 1).parameters(), lr=0.1).step()
    optimizer = build_optimizer(model, InnerSettings(name=name))  # type: ignore[arg-type]
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model(torch.ones(1, 4)).sum().backward()
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


@pytest.mark.parametrize(
    ("schedule", "at", "share"),
    [
        *[(schedule, 0.0, 0.0) for schedule in ("cosine", "linear", "wsd", "constant")],
        *[(schedule, 0.05, 0.5) for schedule in ("cosine", "linear", "wsd", "constant")],
        *[(schedule, 0.1, 1.0) for schedule in ("cosine", "linear", "wsd", "constant")],
        *[(schedule, 0.55, 0.55) for schedule in ("cosine", "linear")],  # half way from 1 to 0.1
        ("linear", 0.325, 0.775),
        ("cosine", 0.325, 0.1 + 0.45 * (1 + 0.5**0.5)),
        ("wsd", 0.55, 1.0),
        ("wsd", 0.75, 1.0),
        ("wsd", 0.875, 0.55),
        ("constant", 0.55, 1.0),
        *[(schedule, end, 0.1) for schedule in ("cosine", "linear", "wsd") for end in (1.0, 1.01)],
        ("constant", 1.0, 1.0),
    ],
)
def test_a_schedule_has_its_exact_values_at_its_corners(schedule: str, at: float, share: float) -> None:
    settings = InnerSettings(lr=2.0, schedule=schedule, decay=0.25)
    assert learning_rate(settings, at, 0.1) == pytest.approx(2.0 * share, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_schedule_has_no_jump_even_where_warm_up_and_fall_overlap(schedule: str) -> None:
    settings = InnerSettings(lr=1.0, schedule=schedule, decay=0.9)
    rates = [learning_rate(settings, step / 1000, 0.4) for step in range(1001)]
    assert max(abs(a - b) for a, b in pairwise(rates)) < 0.003
    assert learning_rate(settings, 0.0, 0.0) == 1.0 and rates[-1] == pytest.approx(0.1)
