"""The constants that reproduce the published goodput, and the published tables themselves, to print beside ours.

Nothing here enters a result but `PUBLISHED`, one set for all cells. Source: arXiv 2604.21428, tables 1a, 1b and 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco_cli.forecast.chips import Constants, Repair

Method = Literal["data_parallel_no_elasticity", "data_parallel_elastic", "decoupled"]

PUBLISHED = Constants(repair=Repair(scale_s=60.0, shape=1.3, exponent=1.2))
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)


@dataclass(frozen=True)
class PublishedRow:
    """Percent of chip time and of time, by `CHIPS`."""

    method: Method
    learners: int
    goodput: tuple[int, ...]
    uptime: tuple[int, ...]


GOODPUT = (
    PublishedRow("data_parallel_no_elasticity", 1, (72, 57, 38, 27, 18), (72, 57, 38, 27, 18)),
    PublishedRow("data_parallel_elastic", 1, (88, 80, 69, 58, 40), (88, 81, 69, 59, 42)),
    PublishedRow("decoupled", 2, (94, 88, 80, 70, 54), (100, 97, 96, 90, 80)),
    PublishedRow("decoupled", 4, (96, 93, 89, 82, 73), (100, 100, 99, 99, 99)),
    PublishedRow("decoupled", 8, (98, 96, 94, 88, 80), (100, 100, 100, 100, 99)),
    PublishedRow("decoupled", 16, (99, 98, 96, 93, 86), (100, 100, 100, 100, 99)),
)

UTILISATIONS = (50, 75, 90, 95, 99)


@dataclass(frozen=True)
class PublishedBandwidth:
    """Gbit/s by `UTILISATIONS` for a model of 5B parameters."""

    step_s: float
    sites: int
    data_parallel: tuple[float, ...]
    bf16: tuple[float, ...]
    int4: tuple[float, ...]


BANDWIDTH = (
    PublishedBandwidth(1.0, 2, (49, 81, 104, 113, 195), (0.58, 1.2, 1.7, 1.9, 2.2), (0.15, 0.29, 0.43, 0.49, 0.53)),
    PublishedBandwidth(5.0, 2, (9.5, 16, 21, 23, 49), (0.12, 0.23, 0.34, 0.39, 0.43), (0.03, 0.06, 0.08, 0.10, 0.11)),
    PublishedBandwidth(1.0, 8, (85, 140, 183, 198, 391), (1.0, 2.0, 3.0, 3.3, 3.8), (0.26, 0.51, 0.75, 0.84, 0.94)),
    PublishedBandwidth(5.0, 8, (17, 28, 37, 40, 49), (0.21, 0.40, 0.59, 0.68, 0.75), (0.05, 0.10, 0.15, 0.17, 0.19)),
)
