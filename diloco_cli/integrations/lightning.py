"""An island inside a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from diloco_cli.loop.island import LoopIsland


class LightningCallback(pl.Callback):  # type: ignore[misc, unused-ignore]  # untyped where lightning is absent
    """Tells `island` of every optimizer step, and ends the training with the run. `tokens`: how many a batch has; those
    of accumulated batches are added up.

    The module returns the optimizer that was given to `join` from `configure_optimizers`, and optimizes automatically.
    """

    def __init__(self, island: LoopIsland, *, tokens: Callable[[Any], int]) -> None:
        self.island, self._tokens, self._steps = island, tokens, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop, self._steps = trainer.should_stop or self.island.over, trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss: torch.Tensor | None = outputs.get("loss") if isinstance(outputs, dict) else outputs
        before, self._steps = self._steps, trainer.global_step  # grows also where a GradScaler leaves a step out
        if self.island.step(tokens=self._tokens(batch), loss=loss, skipped=self._steps > before):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.island.finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.island.fail(exception)
