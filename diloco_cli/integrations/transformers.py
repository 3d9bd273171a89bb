"""An island inside a transformers Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco_cli.loop.island import LoopIsland


class DilocoCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]  # untyped where transformers is absent
    """Tells `island` of every optimizer step, and ends the training with the run. Every sample counts as `tokens_each`
    tokens; the loss is the one that the Trainer has logged last.

    The Trainer takes the optimizer that was given to `join` (`optimizers=(optimizer, schedule)`). Its own loader
    shuffles on its own: an island with addressed data needs one with `island.sampler` (`get_train_dataloader`)."""

    def __init__(self, island: LoopIsland, *, tokens_each: int) -> None:
        self.island, self.tokens_each = island, tokens_each
        self._loss: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        control.should_training_stop = self.island.over

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        samples = args.train_batch_size * args.gradient_accumulation_steps
        skipped = bool(getattr(more.get("optimizer"), "step_was_skipped", False))
        if self.island.step(tokens=samples * self.tokens_each, loss=self._loss, skipped=skipped):
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **more: Any,
    ) -> None:
        self._loss = (logs or {}).get("loss", self._loss)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self.island.finish()
