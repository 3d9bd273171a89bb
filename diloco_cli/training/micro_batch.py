"""Micro-batches: cuts a batch into the parts that the device computes at once, and sizes them for this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from diloco_cli.config.presets import MODEL_PRESETS
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.layout import Layout, ParameterFact
from diloco_cli.plan.memory import Fit, computing, fit_with_micro_batch
from diloco_cli.plan.model_facts import facts_from_parameters, model_facts
from diloco_cli.tasks.build import Batch, build_data, build_model_on_meta
from diloco_cli.tasks.models import divides
from diloco_cli.training.inner import runs_in_bf16

GB = 1e9


def micro_batches(batch: Batch, batch_tokens: int, micro_batch_tokens: int | None) -> Iterator[tuple[Batch, float]]:
    """Parts of whole examples, each with its share of the batch's targets; the last may be smaller. One part if that
    is as large as the batch, or None.

    Raises UsageError for a batch that cannot be divided by examples.
    """
    if micro_batch_tokens is None or micro_batch_tokens >= batch_tokens:
        yield batch, 1.0
        return
    inputs, targets = batch
    examples, at_once = examples_at_once(batch, batch_tokens, micro_batch_tokens)
    if at_once >= examples:
        yield batch, 1.0
        return
    for start in range(0, examples, at_once):
        part = inputs[start : start + at_once], targets[start : start + at_once]
        yield part, part[1].numel() / targets.numel()


def examples_at_once(batch: Batch, batch_tokens: int, micro_batch_tokens: int | None) -> tuple[int, int]:
    """How many examples the batch has, and a micro-batch of it. Raises UsageError if it cannot be divided by them."""
    inputs, targets = batch
    if not inputs.dim() or not targets.dim() or len(inputs) != len(targets):
        raise UsageError(
            f"data: a batch of {list(inputs.shape)} and {list(targets.shape)} cannot be divided into micro-batches: "
            "the first dimension must count examples, as many of both",
            where="data",
            hint=f"--set train.micro_batch_tokens={batch_tokens} takes whole batches",
        )
    return len(inputs), max(1, len(inputs) * (micro_batch_tokens or batch_tokens) // batch_tokens)


def micro_batch_here(
    settings: RunSettings,
    parameters: Iterable[ParameterFact],
    num_fragments: int,
    batch_tokens: int,
    device: torch.device,
    ranks: int = 1,
) -> tuple[int, Fit]:
    """Tokens of a micro-batch on this `device`, one of `ranks` that are alike, and what it holds: by the plan's rule,
    for a machine that is in no plan. Raises InfeasibleError for a batch of fewer sequences than ranks."""
    if settings.model.preset in MODEL_PRESETS:
        model = model_facts(settings.model)
    else:
        sequence = getattr(build_data(settings), "sequence", None)
        found = sequence if isinstance(sequence, int) else 1
        model = facts_from_parameters(list(parameters), found, ranks == 1 or divides(build_model_on_meta(settings)))
    if ranks > max(1, sequences := batch_tokens // model.sequence):
        raise InfeasibleError(
            f"a batch of {sequences} sequences cannot be divided over {ranks} ranks",
            hint=f"--ranks {max(1, sequences)} at most, or another run with larger batches",
        )
    memory_gb = torch.cuda.get_device_properties(device).total_memory / GB if device.type == "cuda" else None
    half = runs_in_bf16(settings.train.precision, device)
    how = computing(settings, half, num_fragments, own_memory=device.type == "cuda")
    fit = fit_with_micro_batch(settings.train, model, batch_tokens, how, ranks, memory_gb)
    return min(fit.sequences * model.sequence, batch_tokens), fit


def parameters_of(layout: Layout) -> list[ParameterFact]:
    """The tensors of a run's model, from its layout, without building the model; each once, also if split by rows."""
    facts = {
        slot.name: ParameterFact(slot.name, slot.shape, fragment.embedding, slot.dtype)
        for fragment in layout.fragments
        for slot in fragment.tensors
    }
    return list(facts.values())
