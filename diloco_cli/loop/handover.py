"""Control is handed over: the actor's loop stops where it wants a step, and goes on when the user's loop has made it.

until_wanted(train, None)      ... hear, offer, adopt ...  -> Wanted: the user's loop trains
until_wanted(train, Stepped)   ... hear, offer, adopt ...  -> Wanted, or None: the run is over
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diloco_cli.loop.loader_state import SavedLoader, StatefulLoader, encoded, joined, parted
from diloco_cli.protocol.actors.ports import Moments, Progression, Stepped
from diloco_cli.protocol.log.operations import Operation, Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.tensors.flat import flatten, unflatten
from diloco_cli.tensors.names import bare_parameters
from diloco_cli.training.inner import restore_inner_state, saved_moments


@dataclass(frozen=True)
class Wanted:
    """The step that the actor waits for: at `position`, in tokens into the island's shard, `at` that place of the
    run."""

    position: int
    at: Progression


def until_wanted(train: Generator[Any, Any, Any], stepped: Stepped | None) -> Steps[Wanted | None]:
    """Go on with `Learner.train` until it wants its next step; None once it has ended."""
    answer: Any = stepped
    while True:
        try:
            operation: Operation | Wanted = train.send(answer)
        except StopIteration:
            return None
        if isinstance(operation, Wanted):
            return operation
        answer = yield operation


class LentTraining:
    """The training port over a model and an optimizer that belong to the user's loop. Only between two steps of it does
    the actor read and write them.

    `loader`: one whose state is saved with the optimizer's, `saved_loader`: the state that was restored last.
    `keeps_loader`: there will be such a loader."""

    def __init__(
        self, run: RunFormat, model: nn.Module, optimizer: torch.optim.Optimizer, keeps_loader: bool = False
    ) -> None:
        self._layout, self._model, self._optimizer = run.layout, model, optimizer
        self._tensors = bare_parameters(model)
        self.keeps_loader = keeps_loader
        self.loader: StatefulLoader | None = None
        self.saved_loader: SavedLoader | None = None
        self._steps = self._position = 0

    def step(self, position: int, batch_tokens: int, at: Progression) -> Generator[Any, Any, Stepped]:
        stepped: Stepped = yield Wanted(position, at)
        self._steps, self._position = self._steps + 1, position + stepped.tokens
        return stepped

    def read(self, fragment: int) -> torch.Tensor:
        """[n] float32 on the CPU."""
        return flatten(self._layout.fragments[fragment], self._tensors)

    def write(self, fragment: int, values: torch.Tensor) -> None:
        """[n] float32."""
        unflatten(self._layout.fragments[fragment], values, self._tensors)

    def save(self) -> Moments | None:
        """Raises UsageError if the loader's state cannot be saved."""
        moments = saved_moments(self._model, self._optimizer) if saves_moments(self._optimizer) else None
        if self.loader is None:
            return moments
        loader = encoded(self.loader, self._position)
        step, own = (self._steps, b"") if moments is None else (moments.step, moments.encode())
        return Moments(step, lambda: joined(own, loader))

    def restore(self, moments: bytes) -> bool:
        own = moments
        if self.keeps_loader:
            own, self.saved_loader = parted(moments)
        if not saves_moments(self._optimizer):
            return keeps_nothing(self._optimizer)
        return restore_inner_state(self._model, self._optimizer, own)

    def reset(self) -> bool:
        if keeps_nothing(self._optimizer):
            return self.keeps_loader
        self._optimizer.state.clear()
        return True


def saves_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its moments can be saved: those of Adam and AdamW, in their usual form, can."""
    usual = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    return usual and not any(group["amsgrad"] or group["capturable"] for group in optimizer.param_groups)


def keeps_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Plain SGD has no state to lose."""
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
