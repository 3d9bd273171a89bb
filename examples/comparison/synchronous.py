"""One island of a synchronous contender: python synchronous.py ddp|diloco STEPS EVERY STEP_S [SEED]

As torchrun starts ranks: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. What travels has 16 bits, over gloo's ring.

    ddp     DistributedDataParallel: gradients are averaged at every step, while the backward pass goes on
    diloco  every EVERY steps the parameters' change is averaged, and the outer optimizer applies it; all wait

After a warm-up exchange rank 0 prints one line of JSON: steps, and the seconds that they took.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from paced import BATCH_TOKENS, Noise, Paced, num_parameters
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

GRADIENT_BUCKETS = 44  # as many as diloco_cli/forecast/bandwidth.py counts with
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


class GlooIsland:
    def __init__(self, model: Paced, trained: nn.Module) -> None:
        self.model, self.trained = model, trained
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.data, self.steps = Noise(), 0

    def step(self) -> None:
        batch = self.data.batch(dist.get_rank(), dist.get_world_size(), self.steps * BATCH_TOKENS, BATCH_TOKENS)
        self.optimizer.zero_grad()
        self.trained(*batch).backward()
        self.optimizer.step()
        self.steps += 1


def parallel_of(model: Paced) -> DistributedDataParallel:
    bucket_mib = 4 * num_parameters() / GRADIENT_BUCKETS / 2**20
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    parallel.register_comm_hook(None, fp16_compress_hook)
    return parallel


def data_parallel(model: Paced, steps: int) -> float:
    """Seconds that the steps took, after one that warms up: its buckets are made anew after it."""
    island = GlooIsland(model, parallel_of(model))
    island.step()
    dist.barrier()
    began_s = time.monotonic()
    for _ in range(steps):
        island.step()
    dist.barrier()
    return time.monotonic() - began_s


def synchronous_diloco(model: Paced, steps: int, every: int) -> float:
    """Seconds that the rounds took, exchanges included."""
    island = GlooIsland(model, model)
    before = parameters_to_vector(model.parameters()).detach().clone()
    outer = torch.optim.SGD([before], lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    island.step()
    dist.barrier()
    began_s = time.monotonic()
    for done in range(1, steps + 1):
        island.step()
        if done % every == 0:
            delta = (before - parameters_to_vector(model.parameters()).detach()).bfloat16()
            dist.all_reduce(delta)
            before.grad = delta.float() / dist.get_world_size()
            outer.step()
            vector_to_parameters(before.clone(), model.parameters())
    dist.barrier()
    return time.monotonic() - began_s


def main() -> None:
    method, steps, every, step_s, seed = sys.argv[1], *map(int, sys.argv[2:4]), float(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dist.init_process_group("gloo")
    model = Paced(step_s)
    took_s = data_parallel(model, steps) if method == "ddp" else synchronous_diloco(model, steps, every)
    if dist.get_rank() == 0:
        print(json.dumps({"steps": steps, "seconds": took_s}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
