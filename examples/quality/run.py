"""Islands against data-parallel training at equal tokens: python examples/quality/run.py [--quick] [--jobs 2]. See
README.md beside this file."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from statistics import mean

import report
from experiment import METHODS, OPTIMIZERS, PARAMETERS, STANDARD, SYNC, TASKS, named, tuning
from ledger import Named, complete, read, say

from diloco_cli.errors import UsageError
from diloco_cli.plan import quality
from diloco_cli.plots import Axis, Series, line_chart, save_svg

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- tables: python examples/quality/run.py --report -->", "<!-- end -->"
PICTURED = {"task": "dense-20", "learners": 4}


def main(words: list[str]) -> None:
    options = parse(words)
    results = options.output / "results.jsonl"
    if not options.report:
        complete(wanted(options), results, options.jobs)
    rows = current(results)
    lines = report.lines(rows, list(TASKS), METHODS)
    print("\n".join(lines))
    if options.report:
        write_between(options.output / "README.md", lines)
        draw(rows, options.output / f"{PICTURED['task']}.svg")
        if options.output == HERE:
            quality.FILE.write_text(planned(rows))
            say(f"wrote {quality.FILE}")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one token a parameter, two learners, one seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["dense-20", "dense-80"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=STANDARD)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--learners", nargs="+", type=int, choices=(2, 4, 8), default=(2, 4, 8))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="the inner learning rates that were tried, and no more")
    parser.add_argument("--report", action="store_true", help="run nothing: README.md's tables of what is finished")
    parser.add_argument("--output", type=Path, help="folder of results.jsonl (default: this one)")
    options = parser.parse_args(words)
    if options.quick:
        options.tasks, options.seeds = ["quick"], 1
    options.output = options.output or (Path("quality-quick") if options.quick else HERE)
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def wanted(options: argparse.Namespace) -> list[Named]:
    """Seed by seed: what is interrupted has every row, each of fewer seeds."""
    if options.tune:
        return tuning("dense-20")
    return [
        named(task, optimizer, method, learners, seed)
        for seed in range(options.seeds)
        for task in options.tasks
        for learners in TASKS[task].learners
        if learners in options.learners
        for method in options.methods
        for optimizer in options.optimizers
    ]


def current(path: Path) -> list[report.Row]:
    """The finished trials that are still what their labels say: a task that has changed has other results."""
    rows = [row for row in read(path).values() if row["labels"]["task"] in TASKS]
    return [row for row in rows if named(**row["labels"]).key == row["key"]]


def planned(rows: list[report.Row]) -> str:
    """What `diloco plan` is told of these results, a line for each: of the dense model, at length."""
    dense = [row for row in rows if row["labels"]["task"].startswith("dense")]
    found = report.measured(dense, PARAMETERS, SYNC)
    return "[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n"


def write_between(page: Path, lines: list[str]) -> None:
    """Put the lines between the page's markers. Raises UsageError if it has none."""
    text = page.read_text() if page.exists() else ""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"no markers for the tables: {BEGIN} and {END}", where=str(page), hint="add the two lines")
    page.write_text("\n".join([head + BEGIN, "", *lines, "", END + tail]))
    say(f"wrote {page}")


def draw(rows: list[report.Row], path: Path) -> None:
    """Held-out loss over processed tokens, means over seeds."""
    series = [
        Series(f"{method}, {optimizer}", mean_curve(mine), dashed=method == "data-parallel")
        for optimizer in OPTIMIZERS
        for method in ("data-parallel", "decoupled")
        if (mine := report.of(rows, **PICTURED, optimizer=optimizer, method=method))
    ]
    if not series:
        return
    title = f"{PICTURED['task']}, M = {PICTURED['learners']}: held-out loss of the outer parameters"
    axes = Axis("processed tokens"), Axis("nats per token")
    try:
        save_svg(path, partial(line_chart, title, *axes, series))
    except UsageError as error:  # the tables are what counts
        say(f"{error}: {error.hint}")
        return
    say(f"wrote {path}")


def mean_curve(rows: list[report.Row]) -> tuple[tuple[float, float], ...]:
    """The first point, where everybody still learns the frequencies of bytes, is left out."""
    curves = [row["curve"] for row in rows]
    return tuple(
        (mean(p[0] for p in points), mean(p[1] for p in points)) for points in list(zip(*curves, strict=True))[1:]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
