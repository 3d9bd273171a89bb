"""What a model gives: forward(inputs, targets) -> the mean loss; while training, perhaps (loss, auxiliary)."""

from __future__ import annotations

from typing import Any

import torch

from diloco_cli.errors import UsageError

CONTRACT = "forward(tokens, targets) must return the mean loss, or (loss, auxiliary) while training: scalar tensors"


def losses_of(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(the loss that is reported, what is differentiated: the loss and, if the model gives one, its auxiliary term).

    An auxiliary term (the balance of experts) shapes the training and appears in no figure. Raises UsageError for
    anything but scalars of a floating type.
    """
    terms = output if isinstance(output, tuple) else (output,)
    if len(terms) not in (1, 2) or not all(_is_scalar(term) for term in terms):
        raise UsageError(f"model: {CONTRACT}, not {_described(output)}", where="model")
    loss: torch.Tensor = terms[0]
    return loss, loss if len(terms) == 1 else loss + terms[1]


def _is_scalar(term: Any) -> bool:
    return isinstance(term, torch.Tensor) and term.numel() == 1 and term.is_floating_point()


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor {list(output.shape)} of {str(output.dtype).removeprefix('torch.')}"
    if isinstance(output, tuple):
        return f"({', '.join(_described(term) for term in output)})"
    return type(output).__name__
