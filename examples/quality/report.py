"""From finished trials to a table and verdicts. Differences are paired by seed; intervals are Student's, 95 %."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

from diloco_cli.config.settings import SyncSettings

Row = dict[str, Any]
Group = tuple[str, int, list[Row]]  # task, number of learners, its trials
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
KINDS = ("task", "learners", "optimizer")
TUNING = "lr"  # the label that only trials of the inner learning rate have


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
    found = [row for row in rows if all(row["labels"].get(name) == value for name, value in labels.items())]
    return sorted(found, key=lambda row: int(row["labels"]["seed"]))


def percent_over(rows: list[Row], others: list[Row]) -> Estimate | None:
    """By how many percent the losses exceed the others' of the same seeds; None where no seed has both."""
    reference = {row["labels"]["seed"]: row["loss"] for row in others}
    pairs = [(row["loss"], reference[row["labels"]["seed"]]) for row in rows if row["labels"]["seed"] in reference]
    return estimate([100 * (loss / other - 1) for loss, other in pairs]) if pairs else None


@dataclass(frozen=True)
class Bound:
    """By how many percent the loss of one (optimizer, method) may exceed another's, by the number of learners."""

    ours: tuple[str, str]
    theirs: tuple[str, str]
    percent: dict[int, float]


def same(percent: float) -> dict[int, float]:
    return dict.fromkeys((2, 4, 8), percent)


ADAMW, MUON = ("adamw", "data-parallel"), ("muon", "data-parallel")
GOALS = (
    Bound(("adamw", "decoupled"), ADAMW, {2: 1.0, 4: 1.5, 8: 3.5}),
    Bound(("muon", "decoupled"), MUON, {2: 1.0, 4: 2.5, 8: 4.5}),
    Bound(("muon", "decoupled"), ADAMW, {2: 0.0, 4: -2.0, 8: 0.5}),
    *(Bound((name, "failures"), (name, "decoupled"), same(2.0)) for name in ("adamw", "muon")),
    *(Bound((name, "decoupled"), (name, "diloco"), same(0.5)) for name in ("adamw", "muon")),
    *(Bound((name, "decoupled"), (name, "default outer"), same(0.0)) for name in ("adamw", "muon")),
    *(Bound((name, "decoupled"), (name, "slow outer"), same(0.0)) for name in ("adamw", "muon")),
    *(Bound((name, "decoupled"), (name, "plain mean"), same(0.0)) for name in ("adamw", "muon")),
    *(Bound((name, "int4"), (name, "decoupled"), same(0.5)) for name in ("adamw", "muon")),
)


def lines(rows: list[Row], tasks: Iterable[str], methods: Iterable[str]) -> list[str]:
    """The page's tables: losses, goals, and the inner learning rates that were tried."""
    tuned = [row for row in rows if TUNING in row["labels"]]
    groups = [
        (task, learners, of([row for row in rows if row not in tuned], task=task, learners=learners))
        for task in tasks
        for learners in (2, 4, 8)
    ]
    rates = rate_table(tuned) if tuned else []
    return [*losses(groups, list(methods)), "", *verdicts(groups), *rates]


def measured(rows: list[Row], parameters: int, sync: SyncSettings) -> list[dict[str, Any]]:
    """What `diloco plan` is told (diloco_cli/plan/quality.py): decoupled over data-parallel with the same optimizer."""
    trials = [row for row in rows if TUNING not in row["labels"]]
    found = []
    for task, learners, optimizer in sorted({tuple(row["labels"][k] for k in KINDS) for row in trials}):
        group = of(trials, task=task, learners=learners, optimizer=optimizer)
        mine = of(group, method="decoupled")
        if gap := percent_over(mine, of(group, method="data-parallel")):
            found.append(
                {
                    "islands": learners,
                    "rounds": round(mean(row["merges"] for row in mine) / sync.fragments),
                    "optimizer": optimizer,
                    "parameters": parameters,
                    "tokens_per_parameter": round(mean(row["processed"] for row in mine) / parameters, 1),
                    "percent": round(gap.value, 2),
                    "half_width": None if gap.half_width is None else round(gap.half_width, 2),
                    "seeds": len(mine),
                    "every": sync.every,
                    "mixing": sync.mixing,
                }
            )
    return found


def losses(groups: list[Group], methods: list[str]) -> list[str]:
    """One line per task, number of learners, method and optimizer."""
    lines = [
        "| task | M | method | optimizer | seeds | held-out loss, mean ± sd | to its data-parallel, % |"
        " to AdamW's, % | merged / processed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task, learners, group in groups:
        for method in methods:
            for optimizer in ("adamw", "muon"):
                if mine := of(group, method=method, optimizer=optimizer):
                    own, adamw = (
                        "" if (optimizer, method) == other else percent_over(mine, by(group, other)) or ""
                        for other in ((optimizer, "data-parallel"), ADAMW)
                    )
                    merged = mean(row["merged"] / row["processed"] for row in mine)
                    lines.append(
                        f"| {task} | {learners} | {method} | {optimizer} | {len(mine)} | {spread(mine)} | {own} |"
                        f" {adamw} | {merged:.2f} |"
                    )
    return lines


def by(rows: list[Row], who: tuple[str, str]) -> list[Row]:
    return of(rows, optimizer=who[0], method=who[1])


def spread(rows: list[Row]) -> str:
    losses = [row["loss"] for row in rows]
    return f"{mean(losses):.4f}" + (f" ± {stdev(losses):.4f}" if len(losses) > 1 else "")


def verdicts(groups: list[Group]) -> list[str]:
    """One line per goal, task and number of learners."""
    lines = ["| task | M | loss of | over | difference, % | goal, % | verdict |", "|---|---|---|---|---|---|---|"]
    for goal in GOALS:
        for task, learners, group in groups:
            if found := percent_over(by(group, goal.ours), by(group, goal.theirs)):
                ours, theirs, percent = " ".join(goal.ours), " ".join(goal.theirs), goal.percent[learners]
                lines.append(
                    f"| {task} | {learners} | {ours} | {theirs} | {found} | <= {percent:+.1f} |"
                    f" {verdict(found, percent)} |"
                )
    return lines


def verdict(found: Estimate, goal_percent: float) -> str:
    """Met and missed are said only where the whole interval lies on one side."""
    side = "met" if found.value <= goal_percent else "missed"
    if found.half_width is None:
        return f"{side} by one seed"
    if abs(found.value - goal_percent) < found.half_width:
        return f"{side} on the mean, not settled by these seeds"
    return side


def rate_table(rows: list[Row]) -> list[str]:
    rates = sorted({row["labels"][TUNING] for row in rows})
    lines = ["", f"| tried inner learning rate | {' | '.join(map(str, rates))} |", "|---|" + "---|" * len(rates)]
    for who in dict.fromkeys(tuple(row["labels"][key] for key in ("optimizer", "method", "learners")) for row in rows):
        optimizer, method, learners = who
        found = [of(rows, lr=rate, optimizer=optimizer, method=method, learners=learners) for rate in rates]
        cells = " | ".join(spread(one) if one else "" for one in found)
        lines.append(f"| {optimizer} {method}, M = {learners} | {cells} |")
    return lines
