"""Merging, and encoding weights, on all cores, beside torch's add_ on as many threads:
python -m tests.benchmarks.all_cores

Wall time, one thread and all of them in turns. Goal: a merge of int8 and of fp32 deltas reaches at least 0.85 of the
scaling of add_, each thread of which adds its own part of two vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from diloco_cli.runtime.processes import usable_cores
from diloco_cli.tensors.stripes import use_threads
from tests.benchmarks.measure import interleaved, machine, ratios, row
from tests.benchmarks.merge import MergeBench, bench

ROUNDS = 9
SIZE = 1 << 25


def on_threads(threads: int, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        use_threads(threads)
        work()
        use_threads(1)

    return run


def added(a: torch.Tensor, b: torch.Tensor, threads: int) -> None:
    parts = zip(a.chunk(threads), b.chunk(threads), strict=True)
    with ThreadPoolExecutor(threads, initializer=torch.get_num_threads) as pool:
        list(pool.map(lambda part: part[0].add_(part[1]), parts))


def scaling(benches: dict[str, MergeBench], threads: int, rounds: int) -> list[str]:
    size = next(iter(benches.values())).form.cut.size
    a, b = torch.zeros(size), torch.ones(size)
    works: dict[str, Callable[[], object]] = {
        "add_": lambda: added(a, b, 1),
        "add_ on all": lambda: added(a, b, threads),
    }
    for name, of in benches.items():
        merge, encode = (lambda of=of: of.merge("avg", check=True)), (lambda of=of: of.form.codec.to_bytes(a))
        works |= {f"{name} merge": merge, f"{name} merge on all": on_threads(threads, merge)}
        works |= {f"{name} encoding": encode, f"{name} encoding on all": on_threads(threads, encode)}
    took = interleaved(works, rounds, cpu=False)
    gains = {name: ratios(took[name], took[f"{name} on all"]) for name in works if not name.endswith(" on all")}
    lines = [row(f"  add_, {threads} threads / one, speed", gains["add_"], "", None)]
    for name in benches:
        reached = ratios(gains[f"{name} merge"], gains["add_"])
        lines.append(row(f"{name} merge, {threads} threads / one, speed", gains[f"{name} merge"], "", None))
        lines.append(row(f"{name} merge, of the scaling of add_", reached, ">= 0.85", median(reached) >= 0.85))
        lines.append(row(f"{name} encoding, {threads} threads / one, speed", gains[f"{name} encoding"], "", None))
    return lines


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    benches = {name: bench(name, SIZE) for name in ("int8", "int4", "bf16", "fp32")}
    print("\n".join(scaling(benches, usable_cores(), ROUNDS)))


if __name__ == "__main__":
    main()
