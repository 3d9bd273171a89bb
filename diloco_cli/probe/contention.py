"""Several processes that train at once on one machine: the speed of each, relative to one process alone.

Speeds on cores are tokens per second of CPU time, times the share of a core that k processes get on an otherwise idle
machine. On a quiet machine that equals the speed by the clock; on a busy one it is the speed of a quiet machine, and
`free` shows how far the speed by the clock was off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from diloco_cli.config.codec import to_plain
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import RunFailedError
from diloco_cli.runtime.units import Child, end_all


@dataclass(frozen=True)
class Spread:
    """The median of `num` values, and their range."""

    median: float
    low: float
    high: float
    num: int

    @property
    def relative(self) -> float:
        """(high - low) / median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.num)


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(median(values), min(values), max(values), len(values))


READY_WITHIN_S = 180.0
LATE_BY_S = 60.0
ENDS_WITHIN_S = 5.0
MAX_PROCESSES = 16
REPEATS = 3
TURNS = 6  # for every number of processes, each half as long: a machine's speed drifts within seconds
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Load:
    """What each process trains: the run's model, `threads` threads, on `device`."""

    run: RunSettings
    folder: Path
    batch_tokens: int
    threads: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class Crowding:
    """`tokens_per_s[k]`: of one of k processes at once. `free`: the share of the wall time in which a process alone had
    a core for itself; well below 1 means that other programs used the machine. `relative[k]`: the speed of one of k
    over that of one alone, each compared within the same turn."""

    tokens_per_s: dict[int, Spread]
    free: float
    relative: dict[int, float]

    @property
    def alone(self) -> Spread:
        return self.tokens_per_s[1]

    def shares(self) -> tuple[float, ...]:
        """For 1, 2, ... processes: the speed of each over that of one alone, never rising; between measured numbers of
        processes the total speed is interpolated linearly."""
        points = sorted(self.relative)
        together = {num: num * self.relative[num] for num in points}
        shares = [1.0]
        for low, high in pairwise(points):
            slope = (together[high] - together[low]) / (high - low)
            shares += [(together[low] + slope * (num - low)) / num for num in range(low + 1, high + 1)]
        return tuple(accumulate(shares, min))


def measure_crowding(load: Load, cores: int, seconds: float, say: Callable[[str], None]) -> Crowding:
    """One process alone, a few at once, and one more than there are cores; interleaved, `TURNS` times each."""
    points = counts_to_measure(cores // load.threads)
    say(f"starting {points[-1]} processes that train {model_name(load.run)}, {load.threads} thread(s) each")
    with _workers(load, points[-1]) as workers:
        speeds: dict[int, list[float]] = {num: [] for num in points}
        free: list[float] = []
        for turn in range(TURNS):
            for num in points:
                say(f"training: {num} at once, {seconds / 2:g} s ({turn + 1} of {TURNS})")
                answers = _train_at_once(workers[:num], seconds / 2)
                on_a_core = [answer["tokens"] * load.threads / max(answer["cpu_s"], 1e-3) for answer in answers]
                speeds[num].append(sum(on_a_core) / num * min(1.0, cores / (num * load.threads)))
                if num == 1:
                    free.append(answers[0]["cpu_s"] / answers[0]["wall_s"] / load.threads)
    spreads = {num: spread_of(values) for num, values in speeds.items()}
    return Crowding(spreads, min(1.0, spread_of(free).median), relative_to_alone(speeds))


def relative_to_alone(speeds: dict[int, list[float]]) -> dict[int, float]:
    """By number of processes the median over turns of the speed over that of one alone in the same turn: a slowdown of
    the whole machine for some seconds affects both."""
    return {
        num: spread_of([speed / alone for speed, alone in zip(values, speeds[1], strict=True)]).median
        for num, values in speeds.items()
    }


def measure_alone(load: Load, seconds: float, say: Callable[[str], None]) -> Spread:
    """One process alone, `REPEATS` times: the speed of one accelerator."""
    say(f"starting a process that trains {model_name(load.run)} on {load.device}")
    with _workers(load, 1) as workers:
        answers = [_train_at_once(workers, seconds)[0] for _ in range(REPEATS)]
    return spread_of([answer["tokens"] / answer["wall_s"] for answer in answers])


def counts_to_measure(at_once: int) -> list[int]:
    """1, 2, half as many as fit, as many as fit, one more; at most `MAX_PROCESSES`."""
    wanted = {1, 2, at_once // 2, at_once, at_once + 1}
    return sorted({min(num, MAX_PROCESSES) for num in wanted if num >= 1})


def model_name(run: RunSettings) -> str:
    return run.model.preset or run.model.huggingface or run.model.entrypoint or "the model"


@contextmanager
def _workers(load: Load, num: int) -> Iterator[list[Child]]:
    """Processes that are ready to train; they end with the block, also after an error."""
    workers: list[Child] = []
    try:
        for shard in range(num):
            workers.append(_start(load, shard, num))
        for worker in workers:
            _answer(worker, READY_WITHIN_S)
        yield workers
    finally:
        end_all(workers, ENDS_WITHIN_S)


def _start(load: Load, shard: int, num_shards: int) -> Child:
    variables = dict.fromkeys(THREAD_VARIABLES, str(load.threads))
    worker = Child("diloco_cli.probe.worker", env=variables)
    order = {
        "settings": to_plain(load.run),
        "folder": str(load.folder),
        "batch_tokens": load.batch_tokens,
        "threads": load.threads,
        "device": load.device,
        "shard": shard,
        "num_shards": num_shards,
    }
    worker.tell(order)
    return worker


def _train_at_once(workers: Sequence[Child], seconds: float) -> list[dict[str, Any]]:
    for worker in workers:
        worker.tell(seconds)
    return [_answer(worker, seconds + LATE_BY_S) for worker in workers]


def _answer(worker: Child, within_s: float) -> dict[str, Any]:
    """A worker's answer. Raises RunFailedError if there is none in time, or if the worker reports an error."""
    try:
        found: dict[str, Any] | None = worker.answer(within_s)
    except TimeoutError:
        raise RunFailedError(f"a training process did not answer within {within_s:.0f} s") from None
    if found is None:
        ended = worker.process.wait(ENDS_WITHIN_S)
        raise RunFailedError(f"a training process ended with {ended}", hint="its last words are above")
    if "error" in found:
        raise RunFailedError(f"the model cannot be trained here: {found['error']}", hint=found["hint"])
    return found
