"""Muon on an island of several ranks: each makes a part of the matrices orthogonal, one at a time, for all of them.

Every rank has the momentum of its own rows (of a sharded matrix; of a copy, of all). Of as many matrices as there are
ranks, each goes to a rank of its own, in bf16, as Newton-Schulz begins; there torch's own Muon computes the update,
and its rows go back. So the work is divided, no rank holds more than one whole matrix, and what is computed is what one
device would compute: left alone, torch adds up partial products of shards in bf16, many times a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.nn.functional import pad

Group = dict[str, Any]


class OfRanks(torch.optim.Optimizer):
    """To be mixed with torch.optim.Muon. All ranks have gradients of the same parameters."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        if ranks == 1:
            super().step()
            return
        for group in self.param_groups:
            due = [parameter for parameter in group["params"] if parameter.grad is not None]
            for start in range(0, len(due), ranks):
                self._step_on(due[start : start + ranks], group)

    def _step_on(self, parameters: list[torch.Tensor], group: Group) -> None:
        """Each of these is at the rank of its place in the list."""
        rank, moved = distributed.get_rank(), None
        for owner, parameter in enumerate(parameters):
            update = _gathered(self._update(parameter, group["momentum"]), parameter, owner)
            if owner == rank:
                moved = self._orthogonal(update, parameter, group)
        for owner, parameter in enumerate(parameters):
            rows = _returned(moved if owner == rank else None, parameter, owner)
            _local(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(rows)

    def _update(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        """Of this rank's rows, in bf16, as torch's Muon has it (Nesterov)."""
        assert parameter.grad is not None
        state, gradient = self.state[parameter], _local(parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer = _local(state["momentum_buffer"]).lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum).bfloat16()

    def _orthogonal(self, update: torch.Tensor, parameter: torch.Tensor, group: Group) -> torch.Tensor:
        """What is to be added to the whole matrix, by torch's Muon on one of zeros."""
        moved = torch.zeros(update.shape, dtype=parameter.dtype, device=update.device, requires_grad=True)
        moved.grad = update.to(parameter.dtype)
        kind: Any = type(self)
        alone = kind([{**group, "params": [moved], "momentum": 0.0, "weight_decay": 0.0}])
        super(OfRanks, alone).step()
        return moved.detach()


def _local(tensor: Any) -> torch.Tensor:
    """This rank's rows, in the tensor's own memory."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _gathered(rows: torch.Tensor, parameter: torch.Tensor, owner: int) -> torch.Tensor:
    """The whole matrix at its `owner`; whatever at the others."""
    if not hasattr(parameter, "to_local"):
        return rows
    ranks, own = distributed.get_world_size(), distributed.get_rank() == owner
    padded = _padded(rows, -(-len(parameter) // ranks)).view(torch.uint8)  # gloo has no bf16
    parts = [torch.empty_like(padded) for _ in range(ranks)] if own else None
    distributed.gather(padded, parts, owner)
    return rows if parts is None else torch.cat(parts).view(torch.bfloat16)[: len(parameter)]


def _returned(moved: torch.Tensor | None, parameter: torch.Tensor, owner: int) -> torch.Tensor:
    """This rank's rows of what the `owner` has."""
    mine, ranks = _local(parameter), distributed.get_world_size()
    if not hasattr(parameter, "to_local"):
        whole = torch.empty_like(mine) if moved is None else moved
        distributed.broadcast(whole, owner)
        return whole
    share = -(-len(parameter) // ranks)
    room = torch.empty(share, *mine.shape[1:], dtype=mine.dtype, device=mine.device)
    parts = None if moved is None else list(torch.split(_padded(moved, share * ranks), share))
    distributed.scatter(room, parts, owner)
    return room[: len(mine)]


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    return pad(rows, (0, 0, 0, count - len(rows))).contiguous()
