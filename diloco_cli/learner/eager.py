"""The optimizers of torch, without its compiler.

torch decorates methods of its optimizers so that torch.compile leaves them out, and the decorators import
torch._dynamo at the first call, which takes almost as long as importing torch itself (torch 2.13.0). No step of a
learner is compiled, so these use the methods without their decorators. Where a torch imports its compiler in another
way, a learner starts as slowly as it did before.
"""

from __future__ import annotations

from inspect import unwrap

import torch


class _Eager(torch.optim.Optimizer):
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(_Eager, torch.optim.AdamW):
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class SGD(_Eager, torch.optim.SGD):
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))
