"""A Lightning module as an island of a run."""

import sys

import lightning.pytorch as pl
import torch
from task import SEQUENCE, Countings, build_model
from torch.utils.data import DataLoader

from diloco_cli import join
from diloco_cli.integrations.lightning import LightningCallback

BATCH = 16


class Counts(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)

    def configure_optimizers(self):
        return self.optimizer

    def training_step(self, batch, number):
        samples, tokens, targets = batch
        print("samples", samples.tolist(), flush=True)
        return self.model(tokens, targets)


def main(run, name):
    module, data = Counts(), Countings()
    with join(run, name=name, model=module.model, optimizer=module.optimizer) as island:
        print("begins at token", island.position, flush=True)
        loader = DataLoader(data, batch_size=BATCH, sampler=island.sampler(data, tokens_each=SEQUENCE))
        pl.Trainer(
            accelerator="cpu",
            max_epochs=-1,  # the run ends it
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            gradient_clip_val=1.0,
            callbacks=[LightningCallback(island, tokens=lambda batch: batch[2].numel())],
        ).fit(module, loader)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
