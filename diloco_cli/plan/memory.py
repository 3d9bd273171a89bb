"""Does the model fit an island's accelerators? A copy on each rank (DDP) if possible, else sharded over all (FSDP).

The formulas below give each part per rank: weights, gradients and moments in float32, divided when sharded; casts of
the weights that autocast keeps in bf16 from a forward pass to its backward pass; activations and logits of a
micro-batch; when sharded, parameters that are gathered; on the rank that commands, fragments that are exchanged.

The micro-batch is `train.micro_batch_tokens`; with `auto` the rank's whole part of a batch, else the largest power of
two of sequences, at least one, such that

    state + 1.4 B x (activations + logits of one sequence) <= 90 % of its memory      of an accelerator
            B x (activations + logits of one sequence)     <= 256 MB                  on the host's memory

The launch and an island that joins choose by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from diloco_cli.config.hardware import HOST_DEVICES, Accelerators, Device, find_device
from diloco_cli.config.models import ModelFacts, facts_from_numbers, preset_shape
from diloco_cli.config.settings import Inventory, ModelSettings, RunSettings, TrainSettings
from diloco_cli.errors import UsageError
from diloco_cli.formulas import formula
from diloco_cli.methods import INNER_OPTIMIZERS
from diloco_cli.plan.plan import MemoryPart, Sharding, shards
from diloco_cli.protocol.log.operations import MAX_BYTES_AT_ONCE

Precision = Literal["auto", "fp32", "bf16"]  # as in `train.precision`
WEIGHT_BYTES, GRADIENT_BYTES = 4, 4  # float32
CAST_BYTES = 2  # per parameter
VALUE_BYTES = 4  # of a fragment that is exchanged, per parameter
SMALLER_FRAGMENTS = (24, 48, 96, 192, 384)  # how many of them there may be, where fewer do not fit
USUAL_OVERLAP = 1  # slots; until the schedule is known
BASE_BYTES, RESIDUAL_BYTES = 4, 8  # per parameter in the host: adopted versions; rounding errors, with error feedback
INPUT_BYTES = 4  # per token, layer and width, of a checkpointed layer: the residual stream is float32
LOGIT_BYTES = 12  # per token and vocabulary entry: float32 logarithms, and the gradients of both their sides
WORKING = ("activations", "logits")  # parts that grow with the micro-batch
USABLE = 0.9  # the rest is fragmentation and the framework's own
WORKING_MARGIN = 1.4
"""The measured peak of a pass of 4,096 tokens and more was at most this factor times the estimate, 0.9 to 1.4: the
built-in models on one rank, on a CPU in fp32 (an AMD EPYC, 2026-11-21). No CUDA device was measured."""
HOST_WORKING_GB = 0.256
"""The free memory of the host is not known, and larger micro-batches are no faster: a core trained gpt-nano 1.1 times
as fast with micro-batches of 8,192 tokens (230 MB) as with 32,768 (690 MB), moe-micro 1.5 times with 4,096 (caches,
fresh pages; on the same machine)."""
GB = 1e9


@dataclass(frozen=True)
class Widths:
    """Bytes that depend on the type that matrix products run in: of what a layer keeps for its backward pass, per token
    and width (`around` the MLP, `routed` where tokens go to experts, `hidden` for each width of values in the MLP), as
    torch's hooks count them; of a sharded layer's parameter that is gathered, with its gradient and buffers; `casts`
    per parameter."""

    around: int
    routed: int
    hidden: int
    gathered: int
    casts: int


HALF = Widths(around=20, routed=10, hidden=4, gathered=12, casts=CAST_BYTES)
FULL = Widths(around=32, routed=16, hidden=8, gathered=20, casts=0)


@dataclass(frozen=True)
class Computing:
    """How a rank computes: matrix products in bf16 (`half`); activations kept, or computed again; bytes of the inner
    optimizer's moments per parameter; fragments of the run; slots that an offer is on its way (`overlap`); copies of a
    fragment that arrives, with its base if that is brought to the device; whether shards are gathered in bf16, too, as
    on accelerators."""

    half: bool = True
    checkpointing: bool = False
    moment_bytes: float = INNER_OPTIMIZERS["adamw"].state_bytes(1.0)
    num_fragments: int = 1
    overlap: int = 0
    arriving: int = 1
    gathers_half: bool = True

    @property
    def widths(self) -> Widths:
        return HALF if self.half else FULL

    @property
    def gathered(self) -> int:
        return HALF.gathered if self.half and self.gathers_half else FULL.gathered


def computing(run: RunSettings, model: ModelFacts, half: bool, num_fragments: int, own_memory: bool) -> Computing:
    """`own_memory`: the device has some, so that what is exchanged is copied to it."""
    sync, moments = run.sync, INNER_OPTIMIZERS[run.train.inner.name].state_bytes(model.hidden)
    overlap = USUAL_OVERLAP if sync.overlap == "auto" else sync.overlap
    arriving = 2 if own_memory and sync.keeps_progress else 1
    return Computing(half, run.train.checkpointing, moments, num_fragments, overlap, arriving, own_memory)


@dataclass(frozen=True)
class Fit:
    """What each rank's device holds, with a micro-batch of `sequences`; `available_gb` None: the host's memory, not
    checked. `devices_needed` and `settings` (of the run) name what would fit; `most_overlap`: the slots that an offer
    may be on its way."""

    parts: tuple[MemoryPart, ...]
    available_gb: float | None
    sharding: Sharding
    ranks: int = 1
    sequences: int = 1
    devices_needed: int | None = None
    settings: tuple[str, ...] = ()
    most_overlap: float = math.inf

    @property
    def needed_gb(self) -> float:
        return sum_gb([part.gb for part in self.parts])

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


def computes_in_half(device: Device, precision: Precision) -> bool:
    """Whether the built-in learner's matrix products run in bf16: weights are cast, activations are half as large;
    `bf16` also where that is emulated. It has no fp16: that would need loss scaling."""
    has_it = device.name not in HOST_DEVICES and device.bf16_tflops is not None
    return precision == "bf16" or (precision == "auto" and has_it)


def model_facts(model: ModelSettings) -> ModelFacts:
    """The facts of a preset or of plain numbers; an entrypoint has to be built, which is not done here."""
    if model.preset is not None:
        shape = preset_shape(model.preset, model.vocabulary)
        return ModelFacts(
            parameters=shape.num_parameters,
            layers=shape.layers,
            width=shape.width,
            sequence=shape.sequence,
            embedding_parameters=shape.embedding_parameters,
            num_tensors=shape.num_tensors,
            idle_parameters=shape.num_parameters - shape.active_parameters,
            hidden_parameters=shape.hidden_parameters,
        )
    if model.parameters and model.layers and model.width and model.sequence:
        return facts_from_numbers(model.parameters, model.layers, model.width, model.sequence, model.vocabulary)
    numbers = "{parameters: 1.0B, layers: 16, width: 2048, sequence: 2048}"
    raise UsageError(
        "model: plan knows presets and plain numbers; the size of an entrypoint's model is unknown",
        hint=f"diloco plan INVENTORY -f RUN --set model='{numbers}'",
    )


def fit_of_nodes(
    accelerators: Accelerators,
    nodes: int,
    ranks: int,
    batch_tokens: int,
    run: RunSettings,
    inventory: Inventory,
    model: ModelFacts,
) -> Fit:
    """The fit of an island of `ranks` ranks on `nodes` nodes that have these accelerators, with batches of
    `batch_tokens`."""
    memory_gb = find_device(accelerators.name, inventory.devices).memory_gb
    how = how_on(accelerators, run, inventory, model)
    fit = fit_with_micro_batch(run.train, model, batch_tokens, how, ranks, memory_gb)
    if not fit.fits or memory_gb is None:
        return fit
    a_slot_gb = exchange_gb(model, replace(how, overlap=how.overlap + 1)) - exchange_gb(model, how)
    return replace(fit, most_overlap=how.overlap + int((fit.usable_gb - fit.needed_gb) / a_slot_gb))


def how_on(
    accelerators: Accelerators, run: RunSettings, inventory: Inventory, model: ModelFacts, overlap: int | None = None
) -> Computing:
    """How a rank on one of these accelerators computes. `overlap`: of the schedule, once that is known."""
    device = find_device(accelerators.name, inventory.devices)
    fragments, half = model.fragments(run.sync.fragments).count, computes_in_half(device, run.train.precision)
    how = computing(run, model, half, fragments, device.memory_gb is not None)
    return how if overlap is None else replace(how, overlap=overlap)


def fit_with_micro_batch(
    train: TrainSettings,
    model: ModelFacts,
    batch_tokens: int,
    how: Computing,
    ranks: int = 1,
    memory_gb: float | None = None,
) -> Fit:
    """The fit of an island's ranks with the micro-batch of each: as set, or with `auto` the largest that fits."""
    most = max(1, -(-batch_tokens // (model.sequence * ranks)))  # the largest part of a batch that one of them has
    least = 1 if train.micro_batch_tokens == "auto" else min(most, max(1, train.micro_batch_tokens // model.sequence))
    asked = train.sharding if model.divides else "ddp"
    fit = memory_fit(model, how, ranks, memory_gb, least, asked)
    if train.micro_batch_tokens != "auto" or not fit.fits:
        return fit
    room_gb = HOST_WORKING_GB
    if memory_gb is not None:
        room_gb = (fit.usable_gb - (fit.needed_gb - fit.working_gb)) / WORKING_MARGIN
    fitting = max(1, int(room_gb / fit.working_gb)) if fit.working_gb > 0 else most
    return with_micro_batch(fit, most if fitting >= most else 1 << (fitting.bit_length() - 1))


def memory_fit(
    model: ModelFacts,
    how: Computing,
    ranks: int,
    memory_gb: float | None,
    sequences: int = 1,
    asked: Literal["auto", "ddp", "fsdp"] = "auto",
) -> Fit:
    """The fit with a micro-batch of `sequences` per rank; one is the smallest that trains. If that does not fit, it
    names what would: more accelerators, or a setting. `asked`: the sharding, as `train.sharding` has it."""

    def sharded(over: int, how: Computing = how) -> Fit:
        parts = memory_parts(model, how, over, sequences)
        return Fit(parts, memory_gb, "fsdp" if over > 1 else "none", over, sequences)

    replicated = replace(sharded(1), sharding="ddp" if ranks > 1 else "none", ranks=ranks)
    if replicated.fits and (asked != "fsdp" or ranks == 1):
        return replicated
    fit = replicated if asked == "ddp" else sharded(ranks)
    if fit.fits:
        return fit
    ways = ["train.sharding=auto"] if asked == "ddp" and model.divides and sharded(ranks).fits else []
    again = replace(how, checkpointing=True)
    ways += ["train.checkpointing=true"] if sharded(1 if asked == "ddp" else ranks, how=again).fits else []
    smaller = [replace(how, num_fragments=count) for count in SMALLER_FRAGMENTS if count > how.num_fragments]
    fitting = (h for h in smaller if sharded(1 if asked == "ddp" else ranks, how=h).fits)
    ways += [f"sync.fragments={h.num_fragments}" for h in islice(fitting, 1)]
    needed = _devices_needed(sharded(2), sharded(4)) if model.divides else None
    return replace(fit, devices_needed=needed, settings=tuple(ways))


def with_micro_batch(fit: Fit, sequences: int) -> Fit:
    """The same fit with a micro-batch of `sequences`, whether or not that still fits."""
    factor = sequences / fit.sequences
    parts = tuple(replace(part, gb=part.gb * factor) if part.name in WORKING else part for part in fit.parts)
    return replace(fit, parts=parts, sequences=sequences)


def memory_parts(model: ModelFacts, how: Computing, ranks: int = 1, sequences: int = 1) -> tuple[MemoryPart, ...]:
    """The memory of one of `ranks` that hold the state together, with a micro-batch of `sequences`."""
    tokens, parameters, sharded = sequences * model.sequence, model.parameters, ranks > 1
    sizes = {
        "weights": weights_gb(WEIGHT_BYTES, parameters, ranks),
        "gradients": gradients_gb(GRADIENT_BYTES, parameters, ranks),
        "moments": moments_gb(how.moment_bytes, parameters, ranks),
        "casts": 0.0 if sharded else how.widths.casts * parameters / GB,
        "activations": activations_gb(activation_bytes(model, how), tokens),
        "logits": logits_gb(tokens, model.vocabulary),
        "gathered": gathered(model, how.gathered, _freed_bytes(model, how)) / GB if sharded else 0.0,
        "exchange": exchange_gb(model, how),
    }
    return tuple(MemoryPart(name, gb) for name, gb in sizes.items() if gb)


@formula("island", "memory, weights", "GB")
def weights_gb(bytes_of_a_parameter: float, parameters: int, ranks: int) -> float:
    return bytes_of_a_parameter * parameters / ranks / GB


gradients_gb = weights_gb.named("memory, gradients")
moments_gb = weights_gb.named("memory, moments")


@formula("island", "memory, activations", "GB")
def activations_gb(kept_of_a_token_bytes: float, tokens: int) -> float:
    return kept_of_a_token_bytes * tokens / GB


@formula("island", "memory, logits", "GB")
def logits_gb(tokens: int, vocabulary: float) -> float:
    return LOGIT_BYTES * tokens * vocabulary / GB


def exchange_gb(model: ModelFacts, how: Computing) -> float:
    """What was sent of each of `overlap` + 1 fragments whose outcome is to come, and what has arrived."""
    largest = model.fragments(how.num_fragments).largest
    return exchanged_gb(largest, model.parameters / how.num_fragments, how.overlap, how.arriving)


@formula("island", "memory, exchange", "GB")
def exchanged_gb(largest: float, mean: float, overlap: int, arriving: int) -> float:
    return VALUE_BYTES * (largest + overlap * min(largest, mean) + arriving * largest) / GB


@formula("island", "memory", "GB")
def sum_gb(parts: Sequence[float]) -> float:
    return sum(parts)


def with_overlap(fit: Fit, model: ModelFacts, how: Computing) -> Fit:
    """The same fit once `how.overlap` is known, whether or not it still fits."""
    gb = exchange_gb(model, how)
    return replace(fit, parts=tuple(replace(part, gb=gb) if part.name == "exchange" else part for part in fit.parts))


def layer_bytes(model: ModelFacts, how: Computing) -> float:
    """What one layer keeps of a token, per width."""
    routed = how.widths.routed if model.idle_parameters else 0
    return kept_by_a_layer(how.widths.around, routed, how.widths.hidden, model.hidden_widths)


@formula("island", "kept by a layer, of a token and width", "bytes")
def kept_by_a_layer(around: int, routed: int, hidden: int, hidden_widths: float) -> float:
    return around + routed + hidden * hidden_widths


def activation_bytes(model: ModelFacts, how: Computing) -> float:
    """Of one token, while the backward pass is in the last layer: its gradients are half as large as what it keeps."""
    if how.checkpointing:
        return checkpointed(model.layers, model.width, _freed_bytes(model, how))
    return kept_by_a_token(layer_bytes(model, how), model.layers, model.width)


@formula("island", "kept of a token", "bytes")
def kept_by_a_token(layer_bytes: float, layers: int, width: int) -> float:
    return layer_bytes * (layers + 0.5) * width


@formula("island", "kept of a token", "bytes")
def checkpointed(layers: int, width: int, freed_bytes: float) -> float:
    return INPUT_BYTES * layers * width + max(0.0, -freed_bytes)


def _freed_bytes(model: ModelFacts, how: Computing) -> float:
    """Of one token, after the backward pass of its logits: they are gone, and if checkpointing a layer is computed
    again in their place, which is the larger if this is negative."""
    layer = layer_bytes(model, how) if how.checkpointing else 0.0
    return freed_of_a_token(model.vocabulary, layer, model.width)


@formula("island", "freed of a token with its logits", "bytes")
def freed_of_a_token(vocabulary: float, layer_computed_again_bytes: float, width: int) -> float:
    return LOGIT_BYTES * vocabulary - 1.5 * layer_computed_again_bytes * width


@formula("island", "gathered", "bytes")
def gathered(model: ModelFacts, bytes_of_a_layer: int, freed_of_a_token: float) -> float:
    """Whole parameters on a rank that holds shards, in float32 what lies outside of layers: for all of a step, and its
    gradient while layers are computed back. Then a layer is there, its gradient, the next layer, and the buffers that
    they are sent through; and the logits are not, with one sequence of them."""
    embedding = model.embedding_parameters
    layer = bytes_of_a_layer * (model.parameters - embedding) / model.layers
    freed = max(0.0, freed_of_a_token) * model.sequence
    return WEIGHT_BYTES * embedding + max(0.0, GRADIENT_BYTES * embedding + layer - freed)


def _devices_needed(two: Fit, four: Fit) -> int | None:
    """The smallest count that fits when sharded, from what two and four devices need; None if no count does."""
    divided = 4 * (two.needed_gb - four.needed_gb)  # what shrinks with the count, in GB of one device alone
    room = two.usable_gb - (two.needed_gb - divided / 2)
    return max(2, math.ceil(divided / room - 1e-9)) if room > 0 else None


@formula("island", "host memory", "GB")
def host_memory_gb(
    bytes_of_a_parameter: float,
    parameters: int,
    overlap: int,
    up_bits: float,
    down_bits: float,
    largest_fragment: float,
) -> float:
    """Memory of the process that commands an island, for the exchange: `host_bytes` of every parameter; for each
    fragment in flight (at most `largest_fragment` parameters) the sent values, the delta and its payload; one arrived
    version, encoded and decoded."""
    in_flight = (overlap + 1) * (4 + 4 + up_bits / 8) + 4 + down_bits / 8
    return (bytes_of_a_parameter * parameters + in_flight * largest_fragment) / GB


def host_bytes(run: RunSettings, model: ModelFacts) -> float:
    """Per parameter, on the host: every adopted version in float32, to measure progress from; with error feedback two
    rounding errors; of the moments that are saved a copy, pinned for a device, and their bytes (without a device their
    bytes are the copy)."""
    moments = INNER_OPTIMIZERS[run.train.inner.name].state_bytes(model.hidden)
    return BASE_BYTES + (RESIDUAL_BYTES if run.sync.error_feedback else 0) + 2 * moments


@formula("syncer", "memory", "GB")
def syncer_memory_gb(
    parameters: int,
    largest_fragment: float,
    up_bits: float,
    down_bits: float,
    islands: int,
    reads_back: bool,
    state_bytes: int,
) -> float:
    """The newest state of every fragment; of one fragment the next version and its weights, and both as read back where
    the store does not check uploads; the payloads on their way, at most MAX_BYTES_AT_ONCE (those that have come wait in
    a file); and 64 MB to work in, enough for three threads that merge."""
    payload = up_bits / 8 * largest_fragment
    coming = max(payload, min(islands * payload, MAX_BYTES_AT_ONCE))
    version = (state_bytes + down_bits / 8) * largest_fragment
    return (state_bytes * parameters + (1 + reads_back) * version + coming + 64e6) / GB
