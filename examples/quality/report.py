"""From finished trials to a table and verdicts. Differences are paired by seed; intervals are Student's, 95 %."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
PUBLISHED_GAP_PERCENT = {2: 0.7, 4: 2.0, 8: 3.9}  # to data-parallel at 35 M parameters (arXiv 2503.09799)
SYNCHRONOUS_GOAL_PERCENT = 0.5
FAILURES_GOAL_PERCENT = 0.6


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `half_width` of its interval, None for one seed."""

    value: float
    half_width: float | None

    def __str__(self) -> str:
        return f"{self.value:+.2f}" + ("" if self.half_width is None else f" ± {self.half_width:.2f}")


def estimate(values: list[float]) -> Estimate:
    """Mean and 95 % interval. Raises ValueError without values."""
    if not values:
        raise ValueError("no trial to take a mean of")
    if len(values) == 1:
        return Estimate(values[0], None)
    return Estimate(mean(values), STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * stdev(values) / sqrt(len(values)))


def of(rows: Iterable[Row], **labels: Any) -> list[Row]:
    """The rows with these labels, by seed."""
    found = [row for row in rows if all(row["labels"][name] == value for name, value in labels.items())]
    return sorted(found, key=lambda row: int(row["labels"]["seed"]))


def percent_over(rows: list[Row], others: list[Row]) -> Estimate | None:
    """By how many percent the losses exceed the others' of the same seeds; None where no seed has both."""
    reference = {row["labels"]["seed"]: row["loss"] for row in others}
    pairs = [(row["loss"], reference[row["labels"]["seed"]]) for row in rows if row["labels"]["seed"] in reference]
    return estimate([100 * (loss / other - 1) for loss, other in pairs]) if pairs else None


def verdict(found: Estimate, goal_percent: float) -> str:
    """Met and missed are said only where the whole interval lies on one side."""
    within = f"{found} % (goal <= {goal_percent} %)"
    if found.half_width is None:
        return f"{within}: one seed tells nothing"
    if found.value + found.half_width <= goal_percent:
        return f"{within}: met"
    if found.value - found.half_width > goal_percent:
        return f"{within}: missed"
    side = "met" if found.value <= goal_percent else "missed"
    return f"{within}: {side} on the mean, not settled by these seeds"


def table(rows: list[Row], methods: Iterable[str]) -> list[str]:
    """One markdown line per task, number of learners and method."""
    lines = [
        "| task | M | method | seeds | held-out loss, mean ± sd | to data-parallel, % | to sync. DiLoCo, % |"
        " merged / processed | participation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task, learners in _groups(rows):
        group = [row for row in rows if (row["labels"]["task"], row["labels"]["learners"]) == (task, learners)]
        for method in methods:
            mine = of(group, method=method)
            if not mine:
                continue
            gaps = [percent_over(mine, of(group, method=other)) for other in ("data-parallel", "diloco")]
            shown = ["" if gap is None or method == other else str(gap) for gap, other in _with_names(gaps)]
            merged = mean(row["merged"] / row["processed"] for row in mine)
            taken = mean(row["participation"] for row in mine)
            lines.append(
                f"| {task} | {learners} | {method} | {len(mine)} | {spread(mine)} | {shown[0]} | {shown[1]} |"
                f" {merged:.2f} | {taken:.2f} |"
            )
    return lines


def spread(rows: list[Row]) -> str:
    losses = [row["loss"] for row in rows]
    return f"{mean(losses):.4f}" + (f" ± {stdev(losses):.4f}" if len(losses) > 1 else "")


def verdicts(rows: list[Row]) -> list[str]:
    """One line per goal, task and number of learners."""
    lines = []
    for task, learners in _groups(rows):
        group = [row for row in rows if (row["labels"]["task"], row["labels"]["learners"]) == (task, learners)]
        published = PUBLISHED_GAP_PERCENT[learners]
        goals = [
            ("decoupled", "diloco", SYNCHRONOUS_GOAL_PERCENT),
            ("failures", "decoupled", FAILURES_GOAL_PERCENT),
            ("decoupled", "data-parallel", published),
            ("decoupled, outer auto", "data-parallel", published),
            ("decoupled, outer auto", "decoupled", 0.0),
            ("decoupled, muon, outer auto", "data-parallel, muon", published),
            ("decoupled, muon, outer auto", "data-parallel", 0.0),
        ]
        for method, other, goal in goals:
            found = percent_over(of(group, method=method), of(group, method=other))
            if found is not None:
                lines.append(f"- {task}, M = {learners}: {method} over {other}: {verdict(found, goal)}")
    return lines


def _groups(rows: list[Row]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row["labels"]["task"], row["labels"]["learners"]) for row in rows))


def _with_names(gaps: list[Estimate | None]) -> list[tuple[Estimate | None, str]]:
    return list(zip(gaps, ("data-parallel", "diloco"), strict=True))
