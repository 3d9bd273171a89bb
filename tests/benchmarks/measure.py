"""Medians, spread and verdicts."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]


def spread(values: list[float], digits: int = 3) -> str:
    """`median (min to max, n)`."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f}, n={len(values)})"


def interleaved(works: dict[str, Callable[[], object]], rounds: int, *, cpu: bool = True) -> dict[str, list[float]]:
    """Seconds of each work in every round, one after the other; CPU seconds of this process unless `cpu` is False. One
    round more comes first and does not count."""
    clock = time.process_time if cpu else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            started = clock()
            work()
            if turn:
                found[name].append(clock() - started)
    return found


def ratios(slow: list[float], fast: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def row(figure: str, values: list[float], goal: str, holds: bool | None, digits: int = 2) -> str:
    """One line of a table; `holds` None: there is no goal."""
    verdict = {True: "yes", False: "NO", None: ""}[holds]
    return f"{figure:<62} {spread(values, digits):<34} {goal:<24} {verdict}".rstrip()


def machine() -> str:
    import torch

    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        text = lines.read()
    model = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), model)
    vectors = "AVX-512" if "avx512f" in text else "no AVX-512"
    today = datetime.now(UTC).date().isoformat()
    python = platform.python_version()
    return f"{model} ({vectors}), {os.cpu_count()} cores, Python {python}, torch {torch.__version__}, {today}"
