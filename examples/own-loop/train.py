"""A training loop of one's own, and what makes it an island of a run: the lines marked with <-."""

import sys

import torch
from task import SEQUENCE, Countings, build_model
from torch.utils.data import DataLoader

from diloco_cli import join  # <-

BATCH = 16


def main(run, name):
    model, data = build_model(), Countings()
    optimizer = torch.optim.AdamW(model.parameters())
    island = join(run, name=name, model=model, optimizer=optimizer)  # <-
    sampler = island.sampler(data, tokens_each=SEQUENCE)  # <-
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=2)
    for samples, tokens, targets in loader:
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - 0.9 * island.progress)  # <- in place of step / steps
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"token {island.position}: loss {loss.item():.3f}, samples {samples.tolist()}", flush=True)
        if island.step(tokens=targets.numel(), loss=loss):  # <-
            break
    island.finish()  # <-


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
