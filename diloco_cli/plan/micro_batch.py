"""How many sequences a device takes at once: `train.micro_batch_tokens`, or with `auto` what its memory holds.

    B = the device's whole part of a batch, else the largest power of two of sequences, such that

    state + 1.6 B x (activations + logits of one sequence) <= 90 % of its memory      of an accelerator
            B x (activations + logits of one sequence)     <= 256 MB                  on the host's memory

and at least one sequence. The launch and an island that joins choose by the same rule.
"""

from __future__ import annotations

from diloco_cli.config.settings import TrainSettings
from diloco_cli.plan.memory import USABLE, Fit, memory_fit, with_micro_batch
from diloco_cli.plan.model_facts import ModelFacts

WORKING_MARGIN = 1.6
"""At most so many times what plan/memory.py estimates was held at the peak of a pass of 4,096 tokens and more: the
built-in models on a CPU in fp32, tests/benchmarks/micro_batch.py."""
HOST_WORKING_GB = 0.256
"""Nobody says how much of the host's memory is free, and larger ones do not pay: a core trained gpt-nano 1.1 times as
fast with micro-batches of 8,192 tokens (230 MB) as with 32,768 (690 MB), moe-micro 1.5 times with 4,096 (caches, fresh
pages; the same benchmark)."""


def fit_with_micro_batch(
    train: TrainSettings,
    model: ModelFacts,
    batch_tokens: int,
    num_devices: int = 1,
    memory_gb: float | None = None,
    num_fragments: int = 1,
    per_node: int = 1,
    half: bool = True,
) -> Fit:
    """The fit of an island's devices (plan/memory.py) with the micro-batch that each of them is to take: as set, or
    with `auto` the largest that fits. The cores of a host share one micro-batch: there `num_devices` counts as one."""
    most = most_sequences(model, batch_tokens, num_devices if memory_gb is not None else 1)
    least = least_sequences(train, model, most)
    fit = memory_fit(model, num_devices, memory_gb, num_fragments, per_node, half, least)
    if train.micro_batch_tokens != "auto" or not fit.fits:
        return fit
    room_gb = HOST_WORKING_GB
    if memory_gb is not None:
        room_gb = (USABLE * memory_gb - (fit.needed_gb - fit.working_gb)) / WORKING_MARGIN
    return with_micro_batch(fit, sequences_within(room_gb, fit.working_gb, most))


def most_sequences(model: ModelFacts, batch_tokens: int, num_devices: int) -> int:
    """One device's part of a batch, the largest of them: then a micro-batch is all of it."""
    return max(1, -(-batch_tokens // (model.sequence * num_devices)))


def least_sequences(train: TrainSettings, model: ModelFacts, most: int) -> int:
    """The smallest micro-batch that the settings allow, of at most `most` sequences."""
    if train.micro_batch_tokens == "auto":
        return 1
    return min(most, max(1, train.micro_batch_tokens // model.sequence))


def sequences_within(room_gb: float, sequence_gb: float, most: int) -> int:
    """`most` if they have room, else the largest power of two that has; at least 1."""
    fitting = int(room_gb / sequence_gb) if sequence_gb > 0 else most
    if fitting >= most:
        return most
    return 1 << (fitting.bit_length() - 1) if fitting >= 1 else 1
