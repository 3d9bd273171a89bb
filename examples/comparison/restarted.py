"""A rank of data-parallel training that begins at the last checkpoint: torchrun restarted.py FOLDER STEP_S SAVE_EVERY

It trains until it is killed. Rank 0 writes a checkpoint every SAVE_EVERY steps, whose name tells the step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from paced import Paced
from synchronous import GlooIsland, parallel_of

KEPT = 2  # checkpoints


def checkpoints(folder: Path) -> list[Path]:
    """The newest last."""
    return sorted(folder.glob("step-*.pt"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def main() -> None:
    folder, step_s, every = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Paced(step_s)
    island = GlooIsland(model, parallel_of(model))
    if found := checkpoints(folder):
        saved = torch.load(found[-1])
        model.load_state_dict(saved["model"])
        island.optimizer.load_state_dict(saved["optimizer"])
        island.steps = step_of(found[-1])
    while True:
        island.step()
        if dist.get_rank() == 0 and island.steps % every == 0:
            new = folder / f"step-{island.steps:09d}.pt"
            torch.save({"model": model.state_dict(), "optimizer": island.optimizer.state_dict()}, f"{new}.new")
            os.replace(f"{new}.new", new)
            for old in checkpoints(folder)[:-KEPT]:
                old.unlink()


if __name__ == "__main__":
    main()
