"""The inner optimizer: weight-decay groups, clipping, precision, rate on the RUN's schedule; its saved state.

The optimizers are torch's without its compiler. torch decorates methods of its optimizers so that torch.compile leaves
them out, and the decorators import torch._dynamo at the first call, which takes almost as long as importing torch
itself (torch 2.13.0). No step of a learner is compiled, so these use the methods without their decorators. If another
torch version imports its compiler elsewhere, a learner only starts more slowly.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from inspect import unwrap
from itertools import islice
from math import cos, inf, isfinite, pi
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import pad

from diloco_cli.config.settings import InnerSettings
from diloco_cli.errors import RunFailedError
from diloco_cli.methods import INNER_OPTIMIZERS, arithmetic_of, hidden_matrices
from diloco_cli.protocol.actors.learner import Moments
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.tensors.flat import bare_parameters, parameter_facts
from diloco_cli.tensors.payload import PayloadError, Spec, from_bytes, to_bytes

FLOOR = 0.1  # what falls ends at this share of the peak
REWARM_STEPS = 20  # after moments were lost
BF16_CAPABILITY = 8  # major number of the first CUDA devices with bf16 in hardware (Ampere); older ones emulate it
COUNTED = "exp_avg_sq"  # who keeps it corrects it for its steps, and torch counts them beside it
FUSED = ("cpu", "cuda")  # where torch has AdamW as one kernel: a third of the time of the others on a CPU


class _Eager(torch.optim.Optimizer):
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(_Eager, torch.optim.AdamW):
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class SGD(_Eager, torch.optim.SGD):
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


def build_optimizer(model: nn.Module, settings: InnerSettings) -> torch.optim.Optimizer:
    """Weight decay for tensors of two or more dimensions, embeddings and positions included, and for nothing else.

    A tied embedding is the output head as well, and a head decays; norms and biases, which have one dimension, do not.
    Raises UsageError for an optimizer that this torch does not have, or that has nothing to do in this model.
    """
    record, trained = INNER_OPTIMIZERS[settings.name], _trained(model)
    facts = [] if record.of_matrices is None else parameter_facts(model)
    hidden = dict.fromkeys(hidden_matrices(settings.name, facts))
    decayed = [p for name, p in trained.items() if p.dim() >= 2 and name not in hidden]
    vectors = [p for p in trained.values() if p.dim() < 2]
    groups: Groups = [
        {"params": [trained[name] for name in hidden], "moments": record.of_matrices},
        {"params": decayed, "moments": record.moments},
        {"params": vectors, "moments": record.moments, "weight_decay": 0.0},
    ]
    groups = [{"weight_decay": settings.weight_decay, **group} for group in groups if group["params"]]
    optimizer: torch.optim.Optimizer = arithmetic_of(record)(groups, settings)
    optimizer.steps_made = 0  # type: ignore[attr-defined]
    return optimizer


def shared_out(optimizer: torch.optim.Optimizer) -> str | None:
    """Which rule has how many of the parameters; None if there is one rule."""
    counts = {True: 0, False: 0}
    for group in optimizer.param_groups:
        counts[group["moments"] == INNER_OPTIMIZERS["muon"].of_matrices] += len(group["params"])
    return f"Muon: {counts[True]} matrices; AdamW: {counts[False]} tensors" if counts[True] else None


def make_step(optimizer: torch.optim.Optimizer) -> None:
    """Counts, because not all of torch's optimizers do."""
    optimizer.step()
    optimizer.steps_made += 1  # type: ignore[attr-defined]


Groups = list[dict[str, Any]]


def moment_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[str, ...]]:
    """What it keeps beside each trained parameter, by the parameter's name, in the model's order."""
    kept = {id(p): group["moments"] for group in optimizer.param_groups for p in group["params"]}
    return {name: kept[id(p)] for name, p in _trained(model).items()}


def adamw(groups: Groups, settings: InnerSettings) -> torch.optim.Optimizer:
    fused = all(p.device.type in FUSED for group in groups for p in group["params"])
    return AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=fused)


def sgd(groups: Groups, settings: InnerSettings) -> torch.optim.Optimizer:
    return SGD(groups, lr=settings.lr)


def muon(groups: Groups, settings: InnerSettings) -> torch.optim.Optimizer:
    """The first group by torch's Muon, each update .2 sqrt(longer side) times as long, which is AdamW's length."""
    kind = type("Muon", (OfRanks, _Eager, torch.optim.Muon), {})
    parts = [kind(groups[:1], lr=settings.lr, adjust_lr_fn="match_rms_adamw")]
    return AsOne([*parts, adamw(groups[1:], settings)] if groups[1:] else parts)


class AsOne(_Eager):
    """Optimizers of different groups as one, with one state. Each goes by its own entries in its groups."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = [(part, len(part.param_groups)) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], parts[-1].defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        groups = iter(self.param_groups)
        for part, count in self._parts:
            part.state, part.param_groups = self.state, list(islice(groups, count))
            part.step()


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The autocast context of a forward pass. bf16: matrix products in bfloat16; parameters, gradients, moments, losses
    and norms stay float32. `auto`: bf16 on CUDA devices that have it, else fp32; on a CPU bf16 is faster only with
    instructions for it and matrices of some width (try it from 128 on), and slower with smaller ones."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if runs_in_bf16(precision, device) else nullcontext()


def runs_in_bf16(precision: str, device: torch.device) -> bool:
    """Whether matrix products run in bf16; `autocast` uses this."""
    bf16_device = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= BF16_CAPABILITY
    return precision == "bf16" or (precision == "auto" and bf16_device)


def clip_gradients(model: nn.Module, clip_norm: float) -> torch.Tensor:
    """Scale all gradients together so that their norm is at most `clip_norm` (0: leave them); returns the norm before,
    a scalar on their device, without waiting for it."""
    return nn.utils.clip_grad_norm_(model.parameters(), clip_norm or inf)


def finite_norm(norm: torch.Tensor | float) -> float:
    """Raises RunFailedError if the norm is not finite: no parameter was changed, and the optimizer must not step."""
    value = float(norm)
    if not isfinite(value):
        raise RunFailedError(
            f"the norm of the gradients is {value}",
            hint="lower train.inner.lr; a restart begins at the newest committed parameters",
        )
    return value


def learning_rate(settings: InnerSettings, fraction: float, warmup_fraction: float) -> float:
    """At `fraction` in [0, 1] of the run: a linear warm-up from zero, then as `settings.schedule` says. A function of
    the run's progress alone, so that whoever joins late has the others' rate."""
    warm = min(1.0, fraction / warmup_fraction) if warmup_fraction > 0 else 1.0
    if settings.schedule == "constant":
        return settings.lr * warm
    falls_from = 1.0 - settings.decay if settings.schedule == "wsd" else warmup_fraction
    fallen = min(1.0, max(0.0, fraction - falls_from) / max(1e-9, 1.0 - falls_from))
    left = 0.5 * (1 + cos(pi * fallen)) if settings.schedule == "cosine" else 1.0 - fallen
    return settings.lr * warm * (FLOOR + (1 - FLOOR) * left)


def step_learning_rate(run: RunFormat, fraction: float, own_steps: int, moments_lost: bool) -> float:
    """The learning rate at `fraction` of the run (see protocol/rules/pacing.py, fraction_of_run), `own_steps` steps
    after this incarnation began or lost its moments. An incarnation that lost them warms up anew."""
    train = run.settings.train
    warmup_tokens = train.inner.warmup_steps * sum(island.batch_tokens for island in run.islands)
    lr = learning_rate(train.inner, fraction, warmup_tokens / train.tokens)
    return lr * min(1.0, (own_steps + 1) / REWARM_STEPS) if moments_lost else lr


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in bare_parameters(model).items() if p.requires_grad}


def _spec(model: nn.Module, optimizer: torch.optim.Optimizer) -> Spec:
    """`step`: of each parameter, as one that got its first gradient later is corrected for fewer of them."""
    trained = _trained(model)
    spec: Spec = {"step": (torch.int64, (len(trained),))}
    for name, moments in moment_names(model, optimizer).items():
        spec |= {f"{moment}.{name}": (torch.float32, tuple(trained[name].shape)) for moment in moments}
    return spec


def saved_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Moments | None:
    """The moments as they are now. Their bytes are made at once, on the host, and are the only copy. None if there
    are none."""
    tensors = moments_of(model, optimizer)
    return None if tensors is None else as_saved(step_of(tensors), to_bytes(tensors))


def as_saved(step: int, data: bytes) -> Moments:
    return Moments(step, lambda: data)


def step_of(tensors: dict[str, torch.Tensor]) -> int:
    """That of the optimizer, after which these moments were."""
    return int(tensors["step"].max())


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor] | None:
    """The present moments in float32, on their device; those that are float32 already are not copied. Of a parameter
    that never had a gradient (an expert that nothing was routed to) they are zero, at step 0, as the optimizer would
    begin them. None if there are none at all (SGD, or no step yet)."""
    trained, moments = _trained(model), moment_names(model, optimizer)
    known = {name: state for name, p in trained.items() if moments[name] and (state := optimizer.state.get(p))}
    if not known:
        return None
    made = optimizer.steps_made  # type: ignore[attr-defined]
    steps = [torch.as_tensor(state.get("step", made)) for state in known.values()]
    at_once = torch.stack([step.to(steps[0].device) for step in steps])  # one wait for the device
    at = dict(zip(known, at_once.long().tolist(), strict=True))
    tensors = {"step": torch.tensor([at.get(name, 0) for name in trained])}
    for name, parameter in trained.items():
        for moment in moments[name]:
            found = known[name][moment].detach() if name in known else torch.zeros_like(parameter, requires_grad=False)
            tensors[f"{moment}.{name}"] = found.float()
    return tensors


def keeps_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is anything to save, to restore and to lose: plain SGD has no state."""
    return any(group["moments"] for group in optimizer.param_groups)


def restore_inner_state(model: nn.Module, optimizer: torch.optim.Optimizer, data: bytes) -> bool:
    """Put saved moments back, in each parameter's own type as the optimizer keeps them; False (and nothing changed)
    if the bytes are not this model's moments, or hold values that an optimizer cannot use."""
    if not keeps_moments(optimizer):
        return False
    tensors = sound_moments(model, optimizer, data)
    if tensors is None:
        return False
    begin_moments(model, optimizer, tensors["step"])
    for name, parameter in _trained(model).items():
        for moment, value in optimizer.state.get(parameter, {}).items():
            if moment != "step":
                value.copy_(tensors[f"{moment}.{name}"])
    return True


def sound_moments(model: nn.Module, optimizer: torch.optim.Optimizer, data: bytes) -> dict[str, torch.Tensor] | None:
    """Saved moments by their names; None if they are not this model's, or not fit for an optimizer."""
    try:
        tensors = from_bytes(data, _spec(model, optimizer))
    except PayloadError:
        return None
    return tensors if _are_sound(tensors) else None


def begin_moments(model: nn.Module, optimizer: torch.optim.Optimizer, steps: torch.Tensor) -> None:
    """Moments of zero, as after so many `steps` of each trained parameter, sharded as the parameters are."""
    optimizer.steps_made = int(steps.max())  # type: ignore[attr-defined]
    fused = bool(optimizer.defaults.get("fused"))  # the fused kernel wants its step count beside the parameters
    trained = _trained(model)
    for (name, moments), step in zip(moment_names(model, optimizer).items(), steps.tolist(), strict=True):
        parameter = trained[name]
        state = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in moments}
        if COUNTED in moments:
            state["step"] = torch.tensor(float(step), device=parameter.device if fused else None)
        optimizer.state[parameter] = state


def _are_sound(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether all values are finite, and no second moment or step count is below zero."""
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    squares = [tensor for name, tensor in tensors.items() if name == "step" or name.startswith(f"{COUNTED}.")]
    return finite and all(bool((tensor >= 0).all()) for tensor in squares)


class OfRanks(torch.optim.Optimizer):
    """To be mixed with torch.optim.Muon: each rank makes a part of the matrices orthogonal, one at a time, for all. All
    ranks have gradients of the same parameters.

    Every rank has the momentum of its own rows (of a sharded matrix; of a copy, of all). Of as many matrices as there
    are ranks, each goes to a rank of its own, in bf16, as Newton-Schulz begins; there torch's own Muon computes the
    update, and its rows go back. So the work is divided, no rank holds more than one whole matrix, and what is computed
    is what one device would compute: left alone, torch adds up partial products of shards in bf16, many times a step.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        if ranks == 1:
            super().step()
            return
        for group in self.param_groups:
            due = [parameter for parameter in group["params"] if parameter.grad is not None]
            for start in range(0, len(due), ranks):
                self._step_on(due[start : start + ranks], group)

    def _step_on(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Each of these is at the rank of its place in the list."""
        rank, moved = distributed.get_rank(), None
        for owner, parameter in enumerate(parameters):
            update = _gathered(self._update(parameter, group["momentum"]), parameter, owner)
            if owner == rank:
                moved = self._orthogonal(update, parameter, group)
        for owner, parameter in enumerate(parameters):
            rows = _returned(moved if owner == rank else None, parameter, owner)
            _local(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(rows)

    def _update(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        """Of this rank's rows, in bf16, as torch's Muon has it (Nesterov)."""
        assert parameter.grad is not None
        state, gradient = self.state[parameter], _local(parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer = _local(state["momentum_buffer"]).lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum).bfloat16()

    def _orthogonal(self, update: torch.Tensor, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """What is to be added to the whole matrix, by torch's Muon on one of zeros."""
        moved = torch.zeros(update.shape, dtype=parameter.dtype, device=update.device, requires_grad=True)
        moved.grad = update.to(parameter.dtype)
        kind: Any = type(self)
        alone = kind([{**group, "params": [moved], "momentum": 0.0, "weight_decay": 0.0}])
        super(OfRanks, alone).step()
        return moved.detach()


def _local(tensor: Any) -> torch.Tensor:
    """This rank's rows, in the tensor's own memory."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _gathered(rows: torch.Tensor, parameter: torch.Tensor, owner: int) -> torch.Tensor:
    """The whole matrix at its `owner`; whatever at the others."""
    if not hasattr(parameter, "to_local"):
        return rows
    ranks, own = distributed.get_world_size(), distributed.get_rank() == owner
    padded = _padded(rows, -(-len(parameter) // ranks)).view(torch.uint8)  # gloo has no bf16
    parts = [torch.empty_like(padded) for _ in range(ranks)] if own else None
    distributed.gather(padded, parts, owner)
    return rows if parts is None else torch.cat(parts).view(torch.bfloat16)[: len(parameter)]


def _returned(moved: torch.Tensor | None, parameter: torch.Tensor, owner: int) -> torch.Tensor:
    """This rank's rows of what the `owner` has."""
    mine, ranks = _local(parameter), distributed.get_world_size()
    if not hasattr(parameter, "to_local"):
        whole = torch.empty_like(mine) if moved is None else moved
        distributed.broadcast(whole, owner)
        return whole
    share = -(-len(parameter) // ranks)
    room = torch.empty(share, *mine.shape[1:], dtype=mine.dtype, device=mine.device)
    parts = None if moved is None else list(torch.split(_padded(moved, share * ranks), share))
    distributed.scatter(room, parts, owner)
    return room[: len(mine)]


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    return pad(rows, (0, 0, 0, count - len(rows))).contiguous()
