"""A Hugging Face Trainer as an island of a run: a tiny Llama on numbers that count on."""

import sys

import torch
from task import SEQUENCE, Countings
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from diloco_cli import join
from diloco_cli.integrations.transformers import DilocoCallback

BATCH, ACCUMULATED = 8, 2


def collate(samples):
    print("samples", [index for index, _, _ in samples], flush=True)
    tokens = torch.stack([torch.cat([inputs, targets[-1:]]) for _, inputs, targets in samples])
    return {"input_ids": tokens, "labels": tokens}


def main(run, name, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Countings()
    with join(run, name=name, model=model, optimizer=optimizer) as island:
        print("begins at token", island.position, flush=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 - 0.9 * island.progress)

        class OwnTrainer(Trainer):
            def get_train_dataloader(self):
                sampler = island.sampler(data, tokens_each=SEQUENCE)
                return DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=collate)

        OwnTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=f"trained-{name}",
                max_steps=10**9,  # the run ends it
                per_device_train_batch_size=BATCH,
                gradient_accumulation_steps=ACCUMULATED,
                use_cpu=True,
                logging_steps=20,
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=data,
            optimizers=(optimizer, schedule),
            callbacks=[DilocoCallback(island, tokens_each=SEQUENCE)],
        ).train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
