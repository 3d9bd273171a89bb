"""Does the model fit an island's accelerators? Replicated if possible, else sharded over all (FSDP).

Per accelerator, in bytes, with N parameters, L layers of width d, sequences of S tokens, n accelerators:

    weights 4 N, gradients 4 N, AdamW's moments 8 N        float32; each divided by n when sharded
    activations 34 S L d, logits 6 S V                     bf16, one sequence at a time
    gathered 6 N / L                                       only when sharded: one layer in bf16, its float32 gradient
    exchange 8 x the largest fragment                      what is sent and what has arrived, float32
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import MemoryPart

WEIGHT_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8  # float32; AdamW has two moments
STATE_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + MOMENT_BYTES
GATHERED_BYTES = 6  # per parameter of one layer while it is gathered: bf16 copy and float32 gradient
ACTIVATION_BYTES = 34  # per token, layer and width, bf16 with fused attention (arXiv 2205.05198, eq. 2)
LOGIT_BYTES = 6  # per token and vocabulary entry: bf16 logits and their float32 softmax
EXCHANGE_BYTES = 8  # per parameter of one fragment: what is sent and what has arrived
USABLE = 0.9  # the rest is fragmentation and the framework's own
GB = 1e9


@dataclass(frozen=True)
class Fit:
    """`needed_gb` per device; `available_gb` None: the host's memory, not checked. `way_out` names what would fit."""

    needed_gb: float
    available_gb: float | None
    sharding: str
    fits: bool
    parts: tuple[MemoryPart, ...] = ()
    devices_needed: int | None = None
    tensor_parallel: int | None = None


def memory_fit(
    model: ModelFacts, num_devices: int, memory_gb: float | None, num_fragments: int = 1, per_node: int = 1
) -> Fit:
    """With a micro-batch of one sequence per device, the smallest that trains. Where not even that fits, what would:
    more accelerators, or splitting every layer over some of the `per_node` that share a node (tensor-parallel)."""
    whole = memory_parts(model, 1, num_fragments)
    if memory_gb is None:
        return Fit(_total(whole), None, "none", True, whole)
    usable = USABLE * memory_gb
    if _total(whole) <= usable:
        return Fit(_total(whole), memory_gb, "none", True, whole)
    parts = memory_parts(model, num_devices, num_fragments)
    fits = num_devices > 1 and _total(parts) <= usable
    if fits:
        return Fit(_total(parts), memory_gb, f"fsdp over {num_devices}", True, parts)
    needed = _devices_needed(model, num_fragments, usable)
    split = _tensor_parallel(model, num_devices, per_node, num_fragments, usable)
    sharding = f"fsdp over {num_devices}" if num_devices > 1 else "none"
    return Fit(_total(parts), memory_gb, sharding, False, parts, needed, split)


def memory_parts(model: ModelFacts, num_devices: int, num_fragments: int, split: int = 1) -> tuple[MemoryPart, ...]:
    """Of one of `num_devices` that hold the state together; `split`: over how many every layer is divided."""
    tokens, parameters = model.sequence, model.parameters
    sizes = {
        "weights": WEIGHT_BYTES * parameters / num_devices,
        "gradients": GRADIENT_BYTES * parameters / num_devices,
        "moments": MOMENT_BYTES * parameters / num_devices,
        "activations": ACTIVATION_BYTES * tokens * model.layers * model.width / split,
        "logits": LOGIT_BYTES * tokens * model.vocabulary / split,
        "gathered layer": GATHERED_BYTES * parameters / model.layers / split if num_devices > 1 else 0.0,
        "exchange": EXCHANGE_BYTES * model.largest_fragment(num_fragments) / num_devices,
    }
    return tuple(MemoryPart(name, size / GB) for name, size in sizes.items() if size)


def _total(parts: tuple[MemoryPart, ...]) -> float:
    return sum(part.gb for part in parts)


def _devices_needed(model: ModelFacts, num_fragments: int, usable_gb: float) -> int | None:
    """The smallest count that fits when sharded; None if no count does."""
    one, two = (_total(memory_parts(model, n, num_fragments)) for n in (2, 4))
    divided = 4 * (one - two)  # what shrinks with the count, in GB of one device alone
    room = usable_gb - (one - divided / 2)
    return math.ceil(divided / room - 1e-9) if room > 0 else None


def _tensor_parallel(
    model: ModelFacts, num_devices: int, per_node: int, num_fragments: int, usable_gb: float
) -> int | None:
    """The smallest power of two of a node's devices that makes it fit, each layer being divided over them."""
    split = 2
    while split <= per_node and per_node % split == 0:
        if _total(memory_parts(model, num_devices, num_fragments, split)) <= usable_gb:
            return split
        split *= 2
    return None


def host_memory_gb(model: ModelFacts, largest: float, overlap: int, up_bits: float, down_bits: float) -> float:
    """Of a learner's process for the exchange: every adopted version in float32; for each fragment in flight (at most
    `largest` parameters) what was sent, its delta and its payload; one arrival, encoded and decoded."""
    in_flight = (overlap + 1) * (4 + 4 + up_bits / 8) + 4 + down_bits / 8
    return (4 * model.parameters + in_flight * largest) / GB


def syncer_memory_gb(model: ModelFacts, largest: float, num_islands: int, up_bits: float, down_bits: float) -> float:
    """Parameters and momentum in float32; of one fragment every island's payload, the written state and the cast; and
    64 MB to work in."""
    per_parameter = num_islands * up_bits / 8 + 8 + down_bits / 8
    return (8 * model.parameters + per_parameter * largest + 64e6) / GB
