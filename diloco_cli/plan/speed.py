"""Tokens per second of an island: measured if the inventory says so, else peak x MFU over FLOPs per token."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.config.devices import CPU, HOST_DEVICES, find_device
from diloco_cli.config.settings import Device, Inventory, IslandSettings
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Assumption

GUESSED_MFU = 0.40  # of the peak; well-tuned dense training reaches 0.35-0.50 on data-centre accelerators
MFU_OF_ACHIEVABLE = 0.5  # where even large matrix products miss the peak, training keeps about half of theirs
CPU_GFLOPS_PER_WIDTH = 0.7  # one core, float32: small matrices starve it, so its rate grows with the width
CPU_GFLOPS_MOST = 120.0
MPS_GFLOPS = 1000.0
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Speed:
    """`tokens_per_s` and the assumption behind it; an emulated slowdown is included."""

    tokens_per_s: float
    assumption: Assumption


def num_devices(island: IslandSettings) -> int:
    return island.accelerators.count * island.nodes


def island_speed(island: IslandSettings, inventory: Inventory, model: ModelFacts) -> Speed:
    """What the island trains when nothing disturbs it."""
    flops_per_s, assumption = _flops_per_s(island, inventory, model)
    tokens_per_s = island.tokens_per_s or flops_per_s / model.flops_per_token
    if island.tokens_per_s:
        assumption = Assumption(f"{island.name}: {island.tokens_per_s:g} tokens/s, from the inventory", "measured")
    return Speed(tokens_per_s / island.slowdown, assumption)


def _flops_per_s(island: IslandSettings, inventory: Inventory, model: ModelFacts) -> tuple[float, Assumption]:
    device = find_device(island.accelerators.name, inventory.devices)
    count = num_devices(island)
    if device.name in HOST_DEVICES:
        gflops = host_gflops(device.name, model)
        what = f"a core at width {model.width}" if device.name == CPU else f"on {device.name}"
        text = f"{island.name}: {gflops:.0f} GFLOP/s {what}; tokens_per_s replaces it"
        return count * gflops * GIGA, Assumption(text, "guessed")
    tflops, kind = peak_tflops(device)
    mfu = island.mfu or default_mfu(device)
    doubt = " (to be checked)" if device.check else ""
    source = f"{count} x {tflops:g} TFLOP/s {kind}{doubt}, MFU {mfu:.2f}"
    mark = "MFU given" if island.mfu else "MFU guessed"
    text = f"{island.name}: {source} ({mark})"
    return count * tflops * TERA * mfu, Assumption(text, "catalogue" if island.mfu else "guessed")


def host_gflops(name: str, model: ModelFacts) -> float:
    """Of one core, or of the host's own accelerator, in training."""
    return min(CPU_GFLOPS_PER_WIDTH * model.width, CPU_GFLOPS_MOST) if name == CPU else MPS_GFLOPS


def peak_tflops(device: Device) -> tuple[float, str]:
    """The dense peak in the best type that training can use: bf16, else fp16, else fp32."""
    for kind in ("bf16", "fp16", "fp32"):
        tflops: float | None = getattr(device, f"{kind}_tflops")
        if tflops is not None:
            return tflops, kind
    raise ValueError(f"the device {device.name} has no peak")


def default_mfu(device: Device) -> float:
    if device.achievable is None:
        return GUESSED_MFU
    return min(GUESSED_MFU, MFU_OF_ACHIEVABLE * device.achievable)
