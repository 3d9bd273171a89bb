"""The callbacks in the real libraries' loops: each optimizer step is told once, and the run ends the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from diloco_cli.errors import UsageError
from tests.numerics.own_loops import Meeting, OwnLoop, own_run
from tests.numerics.tiny import FEATURES, ROWS

WITHOUT = "{} is not installed: pip install 'diloco[{}]'"


class RowSamples(torch.utils.data.Dataset):
    """Each counts as one token: ROWS of them are a batch."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.drawn.append(index)
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum().sin()}


def sampled(loop: OwnLoop, rows: RowSamples, batch_size: int) -> DataLoader:
    return DataLoader(rows, batch_size=batch_size, sampler=loop.island.sampler(rows, tokens_each=1))


def joined() -> OwnLoop:
    return Meeting(own_run()).loop(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))


def trained_to_the_end(loop: OwnLoop, rows: RowSamples, fetched_ahead: int) -> None:
    assert loop.island.over and loop.island._exchange.learner.doing == "DONE"
    steps = loop.island._exchange.learner.progress.steps
    assert steps * ROWS <= len(rows.drawn) <= (steps + fetched_ahead) * ROWS and steps > 10
    assert loop.island.position == (steps - 1) * ROWS or loop.island.position == steps * ROWS


# -- transformers -----------------------------------------------------------------------------------------------------


def trainer_of(loop: OwnLoop, rows: RowSamples, folder: Path, callback: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    class SampledTrainer(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return sampled(loop, rows, ROWS // 2)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            return model(**inputs)

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=10_000, per_device_train_batch_size=ROWS // 2, gradient_accumulation_steps=2,
        use_cpu=True, logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda _: 1.0)
    optimizers = (loop.optimizer, constant)
    return SampledTrainer(loop.model, arguments, train_dataset=rows, optimizers=optimizers, callbacks=[callback])


def test_a_trainer_of_transformers_trains_to_the_end_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=WITHOUT.format("transformers", "hf"))
    pytest.importorskip("accelerate", reason=WITHOUT.format("accelerate", "hf"))
    from diloco_cli.integrations.transformers import DilocoCallback

    loop, rows = joined(), RowSamples()
    trainer_of(loop, rows, tmp_path, DilocoCallback(loop.island, tokens_each=1)).train()
    trained_to_the_end(loop, rows, fetched_ahead=2)
    assert loop.island._exchange.learner.loss is not None


def test_a_trainer_whose_callback_leaves_steps_out_is_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=WITHOUT.format("transformers", "hf"))
    pytest.importorskip("accelerate", reason=WITHOUT.format("accelerate", "hf"))
    from diloco_cli.integrations.transformers import DilocoCallback

    class EveryThird(DilocoCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % 3 == 0:
                super().on_step_end(args, state, control, **more)

    loop = joined()
    with pytest.raises(UsageError, match="2 optimizer steps since the last call"):
        trainer_of(loop, RowSamples(), tmp_path, EveryThird(loop.island, tokens_each=1)).train()


# -- lightning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_trainer_of_lightning_trains_to_the_end_of_the_run(accumulated: int) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason=WITHOUT.format("lightning", "lightning"))
    from diloco_cli.integrations.lightning import LightningCallback

    loop, rows = joined(), RowSamples()

    class Fits(pl.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = loop.model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return loop.optimizer

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            return self.model(**batch)

    pl.Trainer(
        accelerator="cpu", max_epochs=-1, accumulate_grad_batches=accumulated, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[LightningCallback(loop.island, tokens=lambda batch: len(batch["y"]))],
    ).fit(Fits(), sampled(loop, rows, ROWS // accumulated))  # fmt: skip
    trained_to_the_end(loop, rows, fetched_ahead=2)
