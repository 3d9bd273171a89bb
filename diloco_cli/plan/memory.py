"""Does the model fit an island's accelerators? Replicated if possible, else sharded over all (FSDP)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco_cli.plan.model_facts import ModelFacts

STATE_BYTES = 16  # per parameter, float32: weights 4, gradients 4, AdamW's two moments 8
GATHERED_BYTES = 6  # per parameter of one layer while it is gathered: bf16 copy and float32 gradient
ACTIVATION_BYTES = 34  # per token, layer and width, bf16 with fused attention (arXiv 2205.05198, eq. 2)
LOGIT_BYTES = 6  # per token and vocabulary entry: bf16 logits and their float32 softmax
USABLE = 0.9  # the rest is fragmentation and the framework's own
GB = 1e9


@dataclass(frozen=True)
class Fit:
    """`needed_gb` per device; `available_gb` None: the host's memory, not checked."""

    needed_gb: float
    available_gb: float | None
    sharding: str
    fits: bool
    devices_needed: int | None = None


def memory_fit(model: ModelFacts, num_devices: int, memory_gb: float | None) -> Fit:
    """With a micro-batch of one sequence per device, the smallest that trains."""
    whole = replicated_gb(model)
    if memory_gb is None:
        return Fit(whole, None, "none", True)
    usable = USABLE * memory_gb
    if whole <= usable:
        return Fit(whole, memory_gb, "none", True)
    sharded = sharded_gb(model, num_devices)
    if sharded <= usable:
        return Fit(sharded, memory_gb, f"fsdp over {num_devices}", True)
    return Fit(sharded, memory_gb, f"fsdp over {num_devices}", False, _devices_needed(model, usable))


def replicated_gb(model: ModelFacts) -> float:
    return (STATE_BYTES * model.parameters + _activation_bytes(model)) / GB


def sharded_gb(model: ModelFacts, num_devices: int) -> float:
    state = STATE_BYTES * model.parameters / num_devices
    return (state + _unsharded_bytes(model)) / GB


def _activation_bytes(model: ModelFacts) -> float:
    per_token = ACTIVATION_BYTES * model.layers * model.width + LOGIT_BYTES * model.vocabulary
    return model.sequence * per_token


def _unsharded_bytes(model: ModelFacts) -> float:
    return GATHERED_BYTES * model.parameters / model.layers + _activation_bytes(model)


def _devices_needed(model: ModelFacts, usable_gb: float) -> int | None:
    """The smallest count that fits when sharded; None if no count does."""
    room = usable_gb * GB - _unsharded_bytes(model)
    return math.ceil(STATE_BYTES * model.parameters / room) if room > 0 else None
