"""What rank 0 tells the other ranks of its island to do: a few numbers at a time, on the host.

Nothing else tells them: they have no clock, no store and no decision of their own, so that all ranks do the same at the
same step.
"""

from __future__ import annotations

from datetime import timedelta
from enum import IntEnum, auto

import torch
from torch import distributed

SILENT = timedelta(minutes=10)  # rank 0 tells something every few seconds, also while it waits for the run
SIZE = 4


class Command(IntEnum):
    """With its numbers."""

    STEP = auto()  # position, batch_tokens, lr
    READ = auto()  # fragment
    WRITE = auto()  # fragment
    SAVE = auto()
    RESTORE = auto()  # the optimizer's step
    RESET = auto()
    BEAT = auto()
    END = auto()  # the exit status of rank 0: 0 if the run is over


class Commands:
    """On a group of its own, so that a command is on the host whatever the device is. Made by all ranks at once."""

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo", timeout=SILENT)

    def send(self, command: Command, *numbers: float) -> None:
        """Of rank 0."""
        told = torch.zeros(SIZE, dtype=torch.float64)  # exact for positions below 2^53
        told[: 1 + len(numbers)] = torch.tensor([command, *numbers], dtype=torch.float64)
        distributed.broadcast(told, 0, group=self._group)

    def receive(self) -> tuple[Command, list[float]]:
        told = torch.empty(SIZE, dtype=torch.float64)
        distributed.broadcast(told, 0, group=self._group)
        command, *numbers = told.tolist()
        return Command(int(command)), numbers
