"""Tokens per second of an island: measured if the inventory says so, else peak x MFU over FLOPs per token."""

from __future__ import annotations

from typing import Literal

from diloco_cli.config.devices import CPU, HOST_DEVICES, find_device
from diloco_cli.config.settings import Device, Inventory, IslandSettings
from diloco_cli.errors import UsageError
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Assumption

GUESSED_MFU = 0.40  # of the peak; well-tuned dense training reaches 0.35-0.50 on data-centre accelerators
MFU_OF_ACHIEVABLE = 0.5  # where even large matrix products miss the peak, training keeps about half of theirs
CPU_GFLOPS_PER_WIDTH = 0.7  # one core, float32: small matrices starve it, so its rate grows with the width
MAX_CPU_GFLOPS = 120.0
MPS_GFLOPS = 1000.0
TERA, GIGA = 1e12, 1e9
Precision = Literal["auto", "fp32", "bf16"]  # as in `train.precision`


def num_devices(island: IslandSettings) -> int:
    return island.accelerators.count * island.nodes


def island_speed(
    island: IslandSettings, inventory: Inventory, model: ModelFacts, precision: Precision
) -> tuple[float, Assumption]:
    """Tokens per second when nothing disturbs the island but an emulated slowdown, and what that rests on. `precision`:
    the run's. Raises UsageError for a device whose peak in that type is not known, unless its speed is measured."""
    if island.tokens_per_s:
        text = f"{island.name}: {island.tokens_per_s:g} tokens/s, from the inventory"
        return island.tokens_per_s / island.slowdown, Assumption(text, "measured")
    device, count = find_device(island.accelerators.name, inventory.devices), num_devices(island)
    if device.name in HOST_DEVICES:
        gflops = host_gflops(device.name, model)
        what = f"a core at width {model.width}" if device.name == CPU else f"on {device.name}"
        text = f"{island.name}: {gflops:.0f} GFLOP/s {what}; tokens_per_s replaces it"
        flops_per_s, assumption = count * gflops * GIGA, Assumption(text, "guessed")
    else:
        tflops, kind = peak_tflops(device, precision)
        mfu, given = island.mfu or default_mfu(device), "given" if island.mfu else "guessed"
        doubt = " (to be checked)" if device.check else ""
        text = f"{island.name}: {count} x {tflops:g} TFLOP/s {kind}{doubt}, MFU {mfu:.2f} (MFU {given})"
        flops_per_s = count * tflops * TERA * mfu
        assumption = Assumption(text, "catalogue" if island.mfu else "guessed")
    return flops_per_s / model.flops_per_token / island.slowdown, assumption


def host_gflops(name: str, model: ModelFacts) -> float:
    """Of one core, or of the host's own accelerator, in training."""
    return min(CPU_GFLOPS_PER_WIDTH * model.width, MAX_CPU_GFLOPS) if name == CPU else MPS_GFLOPS


def peak_tflops(device: Device, precision: Precision) -> tuple[float, str]:
    """The dense peak: with `fp32` that of fp32, else in the best type that training can use: bf16, else fp16, else
    fp32. Raises UsageError where it is not known."""
    for kind in ("fp32",) if precision == "fp32" else ("bf16", "fp16", "fp32"):
        tflops: float | None = getattr(device, f"{kind}_tflops")
        if tflops is not None:
            return tflops, kind
    raise UsageError(
        f"the {precision} peak of the device {device.name} is not known",
        hint=f"measure it (tokens_per_s), or describe it: devices: {{{device.name}: {{fp32_tflops: 30}}}}",
    )


def computes_in_half(device: Device, precision: Precision) -> bool:
    """Whether the built-in learner's matrix products run in bf16: weights are cast, activations are half as large. It
    has no fp16: that would need loss scaling."""
    return device.name not in HOST_DEVICES and precision != "fp32" and device.bf16_tflops is not None


def default_mfu(device: Device) -> float:
    if device.achievable is None:
        return GUESSED_MFU
    return min(GUESSED_MFU, MFU_OF_ACHIEVABLE * device.achievable)


def speed_warnings(island: IslandSettings, inventory: Inventory, model: ModelFacts, precision: Precision) -> list[str]:
    """A peak that the built-in learner cannot use; a measured speed that the device can hardly have."""
    device = find_device(island.accelerators.name, inventory.devices)
    if device.name in HOST_DEVICES:
        return []
    if island.tokens_per_s:
        return _implausible(island, device, model, precision)
    if peak_tflops(device, precision)[1] != "fp16":
        return []
    head = f"{island.name}: planned with the fp16 peak of {device.name}, but the built-in learner trains it in fp32"
    if device.fp32_tflops is None:
        return [f"{head}; measure it: tokens_per_s"]
    in_fp32 = num_devices(island) * device.fp32_tflops * TERA * (island.mfu or default_mfu(device))
    tokens_per_s = in_fp32 / model.flops_per_token
    return [f"{head}: tokens_per_s: {tokens_per_s:.0f} plans with that ({device.fp32_tflops:g} TFLOP/s)"]


def _implausible(island: IslandSettings, device: Device, model: ModelFacts, precision: Precision) -> list[str]:
    """A measured speed above the peak, or above what even large matrix products reach of it."""
    try:
        tflops, kind = peak_tflops(device, precision)
    except UsageError:
        return []  # nothing to compare with
    most = device.achievable or 1.0
    mfu = (island.tokens_per_s or 0.0) * model.flops_per_token / (num_devices(island) * tflops * TERA)
    if mfu <= most:
        return []
    least = f"; large matrix products reach {100 * most:.0f} %" if most < 1 else ""
    return [
        f"{island.name}: {island.tokens_per_s:g} tokens/s would be {100 * mfu:.0f} % of the {kind} peak of"
        f" {num_devices(island)} x {device.name}{least}: measured with this model?"
    ]
