"""How long the exchange holds up an island of four ranks: python -m tests.benchmarks.rank_blocking

25 M parameters in float32, sharded over real ranks (gloo, on the CPU), with H = P = 24, the run's defaults, and a batch
of 4,096 tokens. Rank 0 sends and adopts every fragment once, through the product's own code, as it does between H
steps; encoding and the store have a thread of their own and are not in it. Beside it, what the ranks' bare sends of as
many values and one copy take; and what saving the moments takes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from math import ceil
from os import getloadavg
from pathlib import Path
from statistics import median

import torch
from torch import distributed

from diloco_cli.learner.beats import own_beats
from diloco_cli.learner.group import join_group
from diloco_cli.learner.place import place_here
from diloco_cli.protocol.actors.fragments import Fragments
from diloco_cli.protocol.actors.ports import Progression
from diloco_cli.tasks.build import build_data
from diloco_cli.training.ranks import RankedTraining, build_rank, follow
from diloco_cli.training.replica import CPU
from diloco_cli.training.wire import TensorWire
from tests.benchmarks.measure import machine, row
from tests.benchmarks.rank_memory import MemoryCase, processes

CASE = MemoryCase("wide", ranks=4, sequences=4, fragments=24)
EVERY, STEPS, ROUNDS = 24, 5, 5
BLOCKED_PERCENT, PER_FRAGMENT = 1.0, 2.0
AT = Progression(0.5, 1, False)
Seconds = dict[str, list[float]]


def bare_s(sizes: list[int]) -> list[float]:
    """Of each fragment: every other rank sends its part to rank 0, which copies it."""
    rank, ranks, found = distributed.get_rank(), distributed.get_world_size(), []
    for size in sizes:
        part = torch.randn(ceil(size / ranks))
        rooms = {} if rank else {r: torch.empty_like(part) for r in range(1, ranks)}
        whole = torch.empty(ranks * len(part))
        started_s = time.perf_counter()
        way = distributed.isend if rank else distributed.irecv
        pairs = rooms or {0: part}
        works = distributed.batch_isend_irecv([distributed.P2POp(way, room, peer) for peer, room in pairs.items()])
        for work in works:
            work.wait()
        if not rank:
            torch.cat([part, *rooms.values()], out=whole)
        found.append(time.perf_counter() - started_s)
    return found


def timed(into: list[float], work: Callable[[], object]) -> object:
    started_s = time.perf_counter()
    found = work()
    into.append(time.perf_counter() - started_s)
    return found


def rank(folder: str) -> None:
    """One of the ranks, in a process of its own."""
    place, run = place_here(), CASE.run()
    assert place is not None
    join_group(place, CPU)
    built = build_rank(run, run.islands[0], build_data(run.settings), CPU, own_beats(place))
    sizes = [fragment.num_parameters for fragment in run.layout.fragments]
    bare = [seconds for _ in range(1 + ROUNDS) for seconds in bare_s(sizes)][len(sizes) :]
    if not place.commands:
        follow(built)
        return
    training = RankedTraining(run, built)
    torch.save({"bare": bare, **exchanged(training, sizes)}, Path(folder) / "seconds.pt")
    training.close(0)


def exchanged(training: RankedTraining, sizes: list[int]) -> Seconds:
    found: Seconds = {name: [] for name in ("step", "read", "exchange", "save")}
    fragments = Fragments(training, TensorWire(training.run))
    for fragment, size in enumerate(sizes):
        fragments.begin(fragment, 0.02 * torch.randn(size))
    training.train(0, CASE.batch_tokens, AT)
    for number in range(STEPS):
        timed(found["step"], lambda n=number: training.train(n * CASE.batch_tokens, CASE.batch_tokens, AT))  # type: ignore[misc]
    for number in range(ROUNDS):
        for fragment in range(len(sizes)):
            timed(found["read"], lambda f=fragment: training.read(f))  # type: ignore[misc]
        exchange: list[float] = []
        for fragment, size in enumerate(sizes):
            merged = 0.02 * torch.randn(size)
            timed(exchange, lambda f=fragment, n=number: fragments.send(f, n, keep=True))  # type: ignore[misc]
            timed(exchange, lambda f=fragment, n=number, m=merged: fragments.adopt(f, m, "rebase", n))  # type: ignore[misc]
        found["exchange"].append(sum(exchange))
        timed(found["save"], training.save)
    return found


def measured() -> Seconds:
    with tempfile.TemporaryDirectory() as folder:
        code = f"from tests.benchmarks.rank_blocking import rank; rank({folder!r})"
        processes(code, CASE.ranks, Path(folder))
        found: Seconds = torch.load(Path(folder) / "seconds.pt")
        return found


def main() -> int:
    print(machine(), f"load {getloadavg()[0]:.1f}", asdict(CASE))
    found = measured()
    step_s = median(found["step"])
    blocked = [100 * seconds / (EVERY * step_s + seconds) for seconds in found["exchange"]]
    over = [a / b for a, b in zip(found["read"], found["bare"], strict=True)]
    goals = [max(blocked) <= BLOCKED_PERCENT, median(over) <= PER_FRAGMENT]
    print(row("seconds of a step", found["step"], "", None))
    print(row("all fragments sent and adopted, % of the time", blocked, f"<= {BLOCKED_PERCENT:g} %", goals[0]))
    print(row("a fragment's read / bare sends and a copy", over, f"<= {PER_FRAGMENT:g} (median)", goals[1]))
    print(row("saving the moments / a step", [seconds / step_s for seconds in found["save"]], "", None))
    return 0 if all(goals) else 1


if __name__ == "__main__":
    sys.exit(main())
