"""Five methods at equal tokens: python examples/quality/run.py [--quick] [--jobs 2]. See README.md beside this file."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import report
from experiment import METHODS, TASKS, Method, Task, named, quick
from ledger import Named, complete, finished, say

from diloco_cli.errors import UsageError
from diloco_cli.plots import Axis, Series, line_chart, save_svg

HERE = Path(__file__).resolve().parent
GAP_TASK, GAP_LEARNERS, GAP_SHARES = "dense", 2, (0.25, 0.5, 1.0, 2.0)  # of the task's tokens
GAP_METHODS: tuple[Method, ...] = ("data-parallel", "decoupled")


def main(words: list[str]) -> None:
    options = parse(words)
    wanted = [
        named(task, method, learners, seed)
        for seed in range(options.seeds)
        for task in chosen_tasks(options)
        for learners in options.learners
        for method in options.methods or task.methods
    ]
    budgets = [] if options.quick else more_budgets(options)
    results = options.output / "results.jsonl"
    if not options.report:
        complete(wanted + budgets, results, options.jobs)
    rows, gap_rows = finished(wanted, results), finished(budgets, results)
    print("\n".join([*report.table(rows, METHODS), "", *report.verdicts(rows), "", *gap_lines(gap_rows)]))
    draw(rows, options.output)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="dense text, M = 2, one seed: does everything work?")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    short = [name for name, task in TASKS.items() if not task.long]
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=short)
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: those of each task")
    parser.add_argument("--learners", nargs="+", type=int, choices=(2, 4, 8), default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="run nothing: the table of what is finished")
    parser.add_argument("--tokens", type=int, help="instead of each task's own budget")
    parser.add_argument("--output", type=Path, help="folder of results.jsonl and the pictures (default: this one)")
    options = parser.parse_args(words)
    if options.quick:
        options.tasks, options.learners, options.seeds = ["dense"], [2], 1
    options.output = options.output or (Path("quality-quick") if options.quick else HERE)
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def chosen_tasks(options: argparse.Namespace) -> list[Task]:
    tasks = [quick(TASKS[name]) if options.quick else TASKS[name] for name in options.tasks]
    return [replace(task, tokens=options.tokens or task.tokens) for task in tasks]


def more_budgets(options: argparse.Namespace) -> list[Named]:
    """Whether the gap shrinks with tokens: whole runs, each with a schedule of its own."""
    if GAP_TASK not in options.tasks or GAP_LEARNERS not in options.learners:
        return []
    task = TASKS[GAP_TASK]
    return [
        named(task, method, GAP_LEARNERS, seed, round(task.tokens * share))
        for seed in range(options.seeds)
        for share in GAP_SHARES
        for method in GAP_METHODS
    ]


def gap_lines(rows: list[report.Row]) -> list[str]:
    """The gap to data-parallel at each budget; nothing without results."""
    if not rows:
        return []
    lines = ["| tokens | seeds | decoupled over data-parallel, % |", "|---|---|---|"]
    for tokens in sorted({row["labels"]["tokens"] for row in rows}):
        decoupled, parallel = (report.of(rows, tokens=tokens, method=method) for method in reversed(GAP_METHODS))
        gap = report.percent_over(decoupled, parallel)
        if gap is not None:
            lines.append(f"| {tokens:,} | {min(len(decoupled), len(parallel))} | {gap} |")
    return lines


def draw(rows: list[report.Row], folder: Path) -> None:
    """A picture per task, at the largest number of learners: held-out loss over processed tokens, means over seeds."""
    for task in dict.fromkeys(row["labels"]["task"] for row in rows):
        learners = max(row["labels"]["learners"] for row in rows if row["labels"]["task"] == task)
        series = [
            Series(method, mean_curve(mine), dashed=method == "data-parallel")
            for method in METHODS
            if (mine := report.of(rows, task=task, learners=learners, method=method))
        ]
        title = f"{task}, M = {learners}: held-out loss of the outer parameters"
        axes = Axis("processed tokens"), Axis("nats per token")
        try:
            save_svg(folder / f"{task}.svg", partial(line_chart, title, *axes, series))
        except UsageError as error:  # the table is what counts
            say(f"{error}: {error.hint}")
            return
        say(f"wrote {folder / f'{task}.svg'}")


def mean_curve(rows: list[report.Row]) -> tuple[tuple[float, float], ...]:
    """The first points, where everybody still learns the frequencies of bytes, are left out."""
    curves = [row["curve"] for row in rows]
    return tuple(
        (mean(p[0] for p in points), mean(p[1] for p in points)) for points in list(zip(*curves, strict=True))[1:]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
