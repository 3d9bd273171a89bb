"""How fast this machine trains a run's model: real inner steps, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from diloco_cli.config.codec import to_plain
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import RunFailedError
from diloco_cli.runtime.units import Child, end_all

READY_WITHIN_S = 180.0
LATE_BY_S = 60.0
ENDS_WITHIN_S = 5.0
REPEATS = 5
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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


def model_name(run: RunSettings) -> str:
    return run.model.preset or run.model.huggingface or run.model.entrypoint or "the model"


def measure_training(
    run: RunSettings, folder: Path, device: str, seconds: float, say: Callable[[str], None]
) -> Spread:  # fmt: skip
    """Tokens per second of one process on `device`, REPEATS times for so many seconds. `folder`: where modules are
    looked for last."""
    threads = run.train.threads
    say(f"training {model_name(run)} on {device}, {REPEATS} times {seconds:g} s")
    worker = Child("diloco_cli.probe.worker", env=dict.fromkeys(THREAD_VARIABLES, str(threads)))
    try:
        worker.tell({"settings": to_plain(run), "folder": str(folder), "device": device})
        _answer(worker, READY_WITHIN_S)
        rates = []
        for _ in range(REPEATS):
            worker.tell(seconds)
            found = _answer(worker, seconds + LATE_BY_S)
            rates.append(found["tokens"] / found["wall_s"])
        return spread_of(rates)
    finally:
        end_all([worker], ENDS_WITHIN_S)


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
