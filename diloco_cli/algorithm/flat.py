"""A model's parameters as the flat vectors of a layout's fragments, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diloco_cli.layout import Fragment, ParameterFact


def parameter_facts(model: torch.nn.Module) -> list[ParameterFact]:
    """Every trained tensor once (tied weights share one name); those of torch.nn.Embedding count as embeddings.

    What is exchanged are the trained parameters, and nothing else: buffers and frozen parameters stay as the model's
    code builds them on every learner, in the evaluator, and in an export (which holds trained parameters only).
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return [
        ParameterFact(name, tuple(parameter.shape), id(parameter) in embeddings, str(parameter.dtype)[len("torch.") :])
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def gather(fragment: Fragment, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The fragment's tensors as one [n] float32 vector on the CPU."""
    flat = torch.empty(fragment.num_parameters, dtype=torch.float32)
    for slot in fragment.tensors:
        flat[slot.start : slot.start + slot.num_elements].copy_(tensors[slot.name].detach().reshape(-1))
    return flat


@torch.no_grad()
def scatter(fragment: Fragment, flat: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy an [n] vector into the fragment's tensors, in place, on whatever device and dtype they have."""
    for slot in fragment.tensors:
        tensors[slot.name].copy_(flat[slot.start : slot.start + slot.num_elements].view(slot.shape))
