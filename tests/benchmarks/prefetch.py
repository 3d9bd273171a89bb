"""Steps a second with the next batch built ahead over without, by wall clock, and by CPU time what it costs.

gpt-nano on one thread, and data that take a known time: asleep (as if they came from a disk), in numpy (which lets
others run) or in Python (which does not). Where other work has the cores, only what sleeps can gain.

python -m tests.benchmarks.prefetch
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from diloco_cli.tasks.build import Batch, Data
from diloco_cli.training.prefetch import Prefetched
from diloco_cli.training.replica import CPU, Replica
from tests.benchmarks.inner_step import BATCH_TOKENS, replica_of
from tests.benchmarks.measure import interleaved, machine, ratios, row

STEPS = 4  # of one measurement
ROUNDS = 25
SHARES = (0.1, 0.5)  # of a step
OVERHEAD_BATCHES = 200
VALUES = np.random.default_rng(0).random(1 << 16)


def asleep(seconds: float) -> None:
    time.sleep(seconds)


def in_numpy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        np.sort(VALUES)


def in_python(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


class Costly:
    """`data` whose batches take `seconds` more."""

    def __init__(self, data: Data, work: Callable[[float], None], seconds: float) -> None:
        self.data, self.work, self.seconds = data, work, seconds

    def batch(self, *request: int) -> Batch:
        self.work(self.seconds)
        return self.data.batch(*request)

    def held_out(self, num_sequences: int) -> Iterator[Batch]:
        return self.data.held_out(num_sequences)


def gains(replica: Replica, data: Data, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of some steps without over with, above 1 it pays: by wall clock, by CPU time."""
    without, ahead = replace(replica, data=data), replace(replica, data=Prefetched(data, CPU, pays=lambda *_: True))
    position = {"without": 0, "ahead": 0}

    def steps(name: str, of: Replica) -> None:
        for _ in range(STEPS):
            of.step(position[name], BATCH_TOKENS, 1e-4)
            position[name] += BATCH_TOKENS

    works = {"without": lambda: steps("without", without), "ahead": lambda: steps("ahead", ahead)}
    wall, cpu = (interleaved(works, rounds, cpu=by_cpu) for by_cpu in (False, True))
    return ratios(wall["without"], wall["ahead"]), ratios(cpu["without"], cpu["ahead"])


def overhead(ahead: bool, rounds: int) -> list[float]:
    """Microseconds of CPU that one batch of gpt-nano's own data takes more, built ahead or not."""
    data = replica_of("gpt-nano").data
    wrapped = Prefetched(data, CPU, pays=lambda *_: ahead)

    def batches(of: Data) -> None:
        for number in range(OVERHEAD_BATCHES):
            of.batch(0, 1, number * BATCH_TOKENS, BATCH_TOKENS)

    found = interleaved({"plain": lambda: batches(data), "wrapped": lambda: batches(wrapped)}, rounds)
    pairs = zip(found["plain"], found["wrapped"], strict=True)
    return [1e6 * (wrapped_s - plain_s) / OVERHEAD_BATCHES for plain_s, wrapped_s in pairs]


def main() -> int:
    torch.set_num_threads(1)
    print(machine())
    print(row("a batch's overhead where it is not built ahead, us of CPU", overhead(False, ROUNDS), "", None, 1))
    print(row("the same where it is", overhead(True, ROUNDS), "", None, 1))
    replica = replica_of("gpt-nano")
    step_s = min(interleaved({"step": lambda: replica.step(0, BATCH_TOKENS, 1e-4)}, ROUNDS, cpu=False)["step"])
    print(row("gpt-nano, a step of 1,024 tokens at best, us", [1e6 * step_s], "", None, 0), flush=True)
    for work in (asleep, in_numpy, in_python):
        for share in SHARES:
            figure = f"a batch takes {100 * share:.0f} % of a step {work.__name__.replace('_', ' ')}"
            found = gains(replica, Costly(replica.data, work, share * step_s), ROUNDS)
            for clock, values in zip(("wall", "CPU"), found, strict=True):
                print(row(f"{figure}, without / with, {clock}", values, "", None, 3), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
