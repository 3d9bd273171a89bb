"""A rank of data-parallel training that begins at the last checkpoint: torchrun restarted.py FOLDER STEP_S SAVE_EVERY

It trains until it is killed. Rank 0 writes a checkpoint every SAVE_EVERY steps, whose name tells the step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reader import Trainee
from torch.nn.parallel import DistributedDataParallel

KEPT = 2  # checkpoints


def checkpoints(folder: Path) -> list[Path]:
    """The newest last."""
    return sorted(folder.glob("step-*.pt"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def save(folder: Path, step: int, saved: Any) -> None:
    new = folder / f"step-{step:09d}.pt"
    torch.save(saved, f"{new}.new")
    os.replace(f"{new}.new", new)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink()


def main() -> None:
    folder, step_s, every = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    trainee = Trainee(step_s)
    trained = DistributedDataParallel(trainee.model, gradient_as_bucket_view=True)
    if found := checkpoints(folder):
        saved = torch.load(found[-1])
        trainee.model.load_state_dict(saved["model"])
        trainee.optimizer.load_state_dict(saved["optimizer"])
        trainee.steps = step_of(found[-1])
    while True:
        trainee.step(dist.get_rank(), dist.get_world_size(), trained)
        if dist.get_rank() == 0 and trainee.steps % every == 0:
            state = {"model": trainee.model.state_dict(), "optimizer": trainee.optimizer.state_dict()}
            save(folder, trainee.steps, state)


if __name__ == "__main__":
    main()
