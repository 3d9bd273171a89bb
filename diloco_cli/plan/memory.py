"""Does the model fit an island's accelerators? Replicated if possible, else sharded over all (FSDP).

Per accelerator, in bytes, with N parameters, L layers of width d, n accelerators, and a micro-batch of B sequences of
S tokens:

    weights 4 N, gradients 4 N, AdamW's moments 8 N        float32; each divided by n when sharded
    casts 2 N                                              only when not sharded: autocast keeps the weights in bf16
                                                           from a forward pass to its backward pass, beside gradients
                                                           that are being accumulated
    activations 34 B S L d, logits 6 B S V                 bf16; in fp32 68 B S L d, 8 B S V
    gathered 6 N / L                                       only when sharded: one layer in bf16, its float32 gradient;
                                                           in fp32 8 N / L
    exchange 8 x the largest fragment                      what is sent and what has arrived, float32

B is `train.micro_batch_tokens`; with `auto` the device's whole part of a batch, else the largest power of two of
sequences, at least one, such that

    state + 1.6 B x (activations + logits of one sequence) <= 90 % of its memory      of an accelerator
            B x (activations + logits of one sequence)     <= 256 MB                  on the host's memory

The launch and an island that joins choose by the same rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from diloco_cli.config.devices import find_device
from diloco_cli.config.settings import Accelerators, Inventory, RunSettings, TrainSettings
from diloco_cli.plan.link import MOMENT_BYTES
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import MemoryPart, Sharding, shards
from diloco_cli.plan.speed import computes_in_half

WEIGHT_BYTES, GRADIENT_BYTES = 4, 4  # float32
CAST_BYTES = 2  # per parameter
EXCHANGE_BYTES = 8  # per parameter of one fragment: what is sent and what has arrived
SAVED_BYTES = 16  # per parameter in the host: a copy of AdamW's moments, and its bytes on the way to the store
WORKING = ("activations", "logits")  # parts that grow with the micro-batch
USABLE = 0.9  # the rest is fragmentation and the framework's own
WORKING_MARGIN = 1.6
"""The measured peak of a pass of 4,096 tokens and more was at most this factor times the estimate: the built-in models
on a CPU in fp32, tests/benchmarks/micro_batch.py."""
HOST_WORKING_GB = 0.256
"""The free memory of the host is not known, and larger micro-batches are no faster: a core trained gpt-nano 1.1 times
as fast with micro-batches of 8,192 tokens (230 MB) as with 32,768 (690 MB), moe-micro 1.5 times with 4,096 (caches,
fresh pages; the same benchmark)."""
GB = 1e9


@dataclass(frozen=True)
class Widths:
    """Bytes that depend on the type that matrix products run in. `gathered`: per parameter of one layer, a copy and
    its float32 gradient; `activations`: per token, layer and width, with fused attention (arXiv 2205.05198, eq. 2);
    `logits`: per token and vocabulary entry, with their float32 softmax; `casts`: per parameter."""

    gathered: int
    activations: int
    logits: int
    casts: int


HALF = Widths(gathered=6, activations=34, logits=6, casts=CAST_BYTES)
FULL = Widths(gathered=8, activations=68, logits=8, casts=0)


@dataclass(frozen=True)
class Fit:
    """What each rank's device holds, with a micro-batch of `sequences`; `available_gb` None: the host's memory, not
    checked. `devices_needed` and `tensor_parallel` name what would fit."""

    parts: tuple[MemoryPart, ...]
    available_gb: float | None
    sharding: Sharding
    ranks: int = 1
    sequences: int = 1
    devices_needed: int | None = None
    tensor_parallel: int | None = None

    @property
    def needed_gb(self) -> float:
        return sum(part.gb for part in self.parts)

    @property
    def shards(self) -> str:
        return shards(self.sharding, self.ranks)

    @property
    def working_gb(self) -> float:
        """The parts that grow with the micro-batch."""
        return sum(part.gb for part in self.parts if part.name in WORKING)

    @property
    def usable_gb(self) -> float:
        return math.inf if self.available_gb is None else USABLE * self.available_gb

    @property
    def fits(self) -> bool:
        return self.needed_gb <= self.usable_gb


def fit_of_nodes(
    accelerators: Accelerators, nodes: int, ranks: int, batch_tokens: int,
    run: RunSettings, inventory: Inventory, model: ModelFacts,
) -> Fit:  # fmt: skip
    """The fit of an island of `ranks` ranks on `nodes` nodes that have these accelerators, with batches of
    `batch_tokens`."""
    device, per_node = find_device(accelerators.name, inventory.devices), ranks // nodes
    num_fragments, half = min(run.sync.fragments, model.num_tensors), computes_in_half(device, run.train.precision)
    return fit_with_micro_batch(run.train, model, batch_tokens, ranks, device.memory_gb, num_fragments, per_node, half)


def fit_with_micro_batch(
    train: TrainSettings,
    model: ModelFacts,
    batch_tokens: int,
    ranks: int = 1,
    memory_gb: float | None = None,
    num_fragments: int = 1,
    per_node: int = 1,
    half: bool = True,
) -> Fit:
    """The fit of an island's ranks with the micro-batch of each: as set, or with `auto` the largest that fits."""
    most = max(1, -(-batch_tokens // (model.sequence * ranks)))  # the largest part of a batch that one of them has
    least = 1 if train.micro_batch_tokens == "auto" else min(most, max(1, train.micro_batch_tokens // model.sequence))
    fit = memory_fit(model, ranks, memory_gb, num_fragments, per_node, half, least, train.sharding)
    if train.micro_batch_tokens != "auto" or not fit.fits:
        return fit
    room_gb = HOST_WORKING_GB
    if memory_gb is not None:
        room_gb = (fit.usable_gb - (fit.needed_gb - fit.working_gb)) / WORKING_MARGIN
    fitting = max(1, int(room_gb / fit.working_gb)) if fit.working_gb > 0 else most
    return with_micro_batch(fit, most if fitting >= most else 1 << (fitting.bit_length() - 1))


def memory_fit(
    model: ModelFacts,
    ranks: int,
    memory_gb: float | None,
    num_fragments: int = 1,
    per_node: int = 1,
    half: bool = True,
    sequences: int = 1,
    asked: Literal["auto", "ddp", "fsdp"] = "auto",
) -> Fit:
    """The fit with a micro-batch of `sequences` per rank; one is the smallest that trains. If that does not fit, it
    names what would: more accelerators, or splitting every layer over some of the `per_node` that share a node
    (tensor-parallel). `half`: matrix products in bf16 or fp16. `asked`: the sharding, as `train.sharding` has it."""

    def sharded(over: int, split: int = 1) -> Fit:
        parts = memory_parts(model, over, num_fragments, split, half, sequences)
        return Fit(parts, memory_gb, "fsdp" if over > 1 else "none", over, sequences)

    replicated = replace(sharded(1), sharding="ddp" if ranks > 1 else "none", ranks=ranks)
    if replicated.fits and (asked != "fsdp" or ranks == 1):
        return replicated
    fit = replicated if asked == "ddp" else sharded(ranks)
    if fit.fits:
        return fit
    # powers of two of a node's devices, over which every layer could be divided
    splits = (2**power for power in range(1, per_node.bit_length()) if per_node % 2**power == 0)
    split = next((split for split in splits if sharded(ranks, split).fits), None)
    return replace(fit, devices_needed=_devices_needed(sharded(2), sharded(4)), tensor_parallel=split)


def with_micro_batch(fit: Fit, sequences: int) -> Fit:
    """The same fit with a micro-batch of `sequences`, whether or not that still fits."""
    factor = sequences / fit.sequences
    parts = tuple(replace(part, gb=part.gb * factor) if part.name in WORKING else part for part in fit.parts)
    return replace(fit, parts=parts, sequences=sequences)


def memory_parts(
    model: ModelFacts, num_devices: int, num_fragments: int, split: int = 1, half: bool = True, sequences: int = 1
) -> tuple[MemoryPart, ...]:
    """The memory of one of `num_devices` that hold the state together, with a micro-batch of `sequences`; `split`: the
    number of devices over which every layer is divided."""
    tokens, parameters, each = sequences * model.sequence, model.parameters, HALF if half else FULL
    sizes = {
        "weights": WEIGHT_BYTES * parameters / num_devices,
        "gradients": GRADIENT_BYTES * parameters / num_devices,
        "moments": MOMENT_BYTES * parameters / num_devices,
        "casts": each.casts * parameters if num_devices == 1 else 0.0,
        "activations": each.activations * tokens * model.layers * model.width / split,
        "logits": each.logits * tokens * model.vocabulary / split,
        "gathered layer": each.gathered * parameters / model.layers / split if num_devices > 1 else 0.0,
        "exchange": EXCHANGE_BYTES * model.max_fragment(num_fragments) / num_devices,
    }
    return tuple(MemoryPart(name, size / GB) for name, size in sizes.items() if size)


def _devices_needed(two: Fit, four: Fit) -> int | None:
    """The smallest count that fits when sharded, from what two and four devices need; None if no count does."""
    divided = 4 * (two.needed_gb - four.needed_gb)  # what shrinks with the count, in GB of one device alone
    room = two.usable_gb - (two.needed_gb - divided / 2)
    return max(2, math.ceil(divided / room - 1e-9)) if room > 0 else None


def host_memory_gb(
    model: ModelFacts, largest: float, overlap: int, up_bits: float, down_bits: float, saved: bool = True
) -> float:
    """Memory of a learner's process for the exchange: every adopted version in float32; for each fragment in flight (at
    most `largest` parameters) the sent values, the delta and its payload; one arrived version, encoded and decoded; if
    AdamW's moments are `saved`, a copy of them and their bytes."""
    in_flight = (overlap + 1) * (4 + 4 + up_bits / 8) + 4 + down_bits / 8
    whole = 4 + (SAVED_BYTES if saved else 0)
    return (whole * model.parameters + in_flight * largest) / GB


def syncer_memory_gb(model: ModelFacts, largest: float, up_bits: float, down_bits: float) -> float:
    """Parameters and momentum in float32; of one fragment the next version and the same read back, its weights, and one
    payload (the others wait in a file, however many islands there are); and 64 MB to work in."""
    per_parameter = 8 + 8 + down_bits / 8 + up_bits / 8
    return (8 * model.parameters + per_parameter * largest + 64e6) / GB
