"""The optimizers of torch, without its compiler.

torch's own import torch._dynamo as they are built and as they step, only to say that these functions are not to be
compiled: that takes almost as long as importing torch itself, and 80 MB in every learner (torch 2.13.0). No optimizer
is compiled here, so nothing needs to be said. A torch that says it in another way does so, and is as slow as before.
"""

from __future__ import annotations

from inspect import unwrap

import torch


class AdamW(torch.optim.AdamW):
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class SGD(torch.optim.SGD):
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


def _say_nothing() -> None:
    """The wrapper around each of these functions imports the compiler unless it finds this attribute."""
    for function in vars(torch.optim.Optimizer).values():
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and not hasattr(wrapped, "__dynamo_disable"):
            wrapped.__dynamo_disable = wrapped


_say_nothing()
