"""Fleets whose learners are unlike, or there for a part of the run: the published figures of mixed hardware and of
scavenged capacity (arXiv 2604.21428), in closed form. No constant is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEARNERS_OF_A_KIND = 4  # of each of two generations of TPUs
SPEEDS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the slower learners, relative to the faster
BASE_LEARNERS = 4
SCAVENGED_SHARE = 0.5  # of the run's FLOPs, with the additional learners


@dataclass(frozen=True)
class PublishedRule:
    """Of merges, on mixed hardware. `goodput`: percent of chip time."""

    quorum: int
    window: bool
    goodput: float


MIXED = (PublishedRule(8, False, 84.0), PublishedRule(1, False, 100.0), PublishedRule(1, True, 100.0))


@dataclass(frozen=True)
class MixedRow:
    """One cell. `difference_points` None: the goodput depends on the slower learners' speed, which the publication does
    not give."""

    quorum: int
    window: bool
    speed: float
    goodput_percent: float
    published_goodput_percent: float
    difference_points: float | None


def mixed_constants() -> dict[str, float]:
    return {"learners_of_a_kind": LEARNERS_OF_A_KIND}


def scavenged_constants() -> dict[str, float]:
    return {"learners": BASE_LEARNERS, "scavenged_share": SCAVENGED_SHARE}


def mixed_rows() -> list[MixedRow]:
    """The published rules at each of SPEEDS. A grace window lies within the overlap, so that nobody waits for it."""
    rows = []
    for rule in MIXED:
        goodputs = [100 * goodput_of_quorum(_mixed(speed), rule.quorum) for speed in SPEEDS]
        known = min(goodputs) == max(goodputs)
        for speed, percent in zip(SPEEDS, goodputs, strict=True):
            difference = percent - rule.goodput if known else None
            rows.append(MixedRow(rule.quorum, rule.window, speed, percent, rule.goodput, difference))
    return rows


def _mixed(speed: float) -> list[float]:
    return [1.0] * LEARNERS_OF_A_KIND + [speed] * LEARNERS_OF_A_KIND


def goodput_of_quorum(speeds: Sequence[float], quorum: int) -> float:
    """Share of the learners' time that is spent on steps, in a long run of equal numbers of steps between merges: the
    K-th fastest sets the pace of merges, and learners that are faster wait for it."""
    pace = sorted(speeds, reverse=True)[quorum - 1]
    return sum(min(1.0, pace / speed) for speed in speeds) / len(speeds)


@dataclass(frozen=True)
class PublishedTime:
    """To the run's end with `more` learners (a share of the base ones), in percent of the time without them."""

    more: float
    decoupled: float
    data_parallel: float


SCAVENGED = (
    PublishedTime(0.0, 100.0, 100.0),
    PublishedTime(0.25, 90.0, 107.0),
    PublishedTime(0.5, 83.0, 109.0),
    PublishedTime(1.0, 75.0, 102.0),
    PublishedTime(3.0, 62.0, 80.0),
)


@dataclass(frozen=True)
class ScavengedRow:
    """One cell. `time_percent` None: the publication does not give what the method pays when learners come and go."""

    method: str
    more_percent: float
    time_percent: float | None
    published_time_percent: float
    difference_points: float | None


def scavenged_rows() -> list[ScavengedRow]:
    rows = []
    for cell in SCAVENGED:
        percent = 100 * scavenged_time(cell.more)
        difference = percent - cell.decoupled
        rows.append(ScavengedRow("decoupled", 100 * cell.more, percent, cell.decoupled, difference))
    return rows + [ScavengedRow("data_parallel", 100 * c.more, None, c.data_parallel, None) for c in SCAVENGED]


def scavenged_time(more: float) -> float:
    """Relative to the time without additional learners, who cost the others nothing when they come or go."""
    return (1 - SCAVENGED_SHARE) + SCAVENGED_SHARE / (1 + more)
