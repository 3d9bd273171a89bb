"""Medians and spread, nothing else."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from statistics import median


def spread(values: list[float], digits: int = 3) -> str:
    """`median (min to max, n)`."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f}, n={len(values)})"


def machine() -> str:
    import torch

    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    today = datetime.now(UTC).date().isoformat()
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, {today}"
