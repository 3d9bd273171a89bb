"""A kill every so often: python examples/comparison/storm.py [--repetitions 3 | --hangs 50]. See README.md beside this.

Useful tokens/s, pauses and the time to a held-out loss of `diloco`, of data-parallel training that torchrun restarts,
and of torchft's DiLoCo, beside what each has undisturbed. What is measured lies in storm.jsonl, where a second start
finds it done; the table and whether the goals are met go into README.md.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, TARGETS, TORCHFT, Contender, HeldOutLoss, why_no_torchft
from kept import HERE, complete, measured_on, publish

HANGS_S = 60.0  # without progress
ENOUGH = 10  # marks of `diloco`, or steps of the others: all train
LOOK_S = 2.0  # between two looks at the loss
TARGET_SHARE = 2 / 3  # of the time of undisturbed data-parallel training, which then has the loss that all must reach
GOAL_KEPT, GOAL_OVER, GOAL_TIME, GOAL_STORMS = 0.92, 1.7, 0.7, 50
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class StormCase:
    """`every_s`: between kills; None: nobody is killed."""

    method: str
    every_s: float | None
    seed: int

    def lasts_s(self, seconds: float) -> float:
        """Half as long if nobody is killed."""
        return seconds if self.every_s else seconds / 2

    def kills(self, seconds: float) -> Iterator[tuple[float, str]]:
        """When, and of what: the same for every method."""
        drawn, at_s = random.Random(self.seed), 0.0
        while self.every_s is not None and (at_s := at_s + self.every_s) <= seconds:
            yield at_s - drawn.uniform(0.1, 0.6) * self.every_s, drawn.choice(TARGETS)


def measured(storm: StormCase, seconds: float) -> dict[str, Any]:
    """From the time that everybody trains on. A hang ends it."""
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        contender = CONTENDERS[storm.method].start(Path(name), storm.seed)
        try:
            latest_s, first_s = time.monotonic() + HANGS_S, None
            while contender.marks() < ENOUGH:
                if first_s is None and contender.tokens():
                    first_s = time.monotonic()
                if time.monotonic() > latest_s:
                    raise SystemExit(f"{storm}: no start within {HANGS_S:g} s")
                time.sleep(0.2)
            return weathered(storm, contender, seconds, first_s or time.monotonic())
        finally:
            contender.close()


def weathered(storm: StormCase, contender: Contender, seconds: float, first_s: float) -> dict[str, Any]:
    """`first_s`: when the contender first had something to keep; from then on counts the time to a loss."""
    kills, held_out = list(storm.kills(seconds)), HeldOutLoss()
    lasts_s = storm.lasts_s(seconds)
    asked: list[Future[bool]] = []
    losses: list[tuple[float, float]] = []
    began_s, before = time.monotonic(), contender.tokens()
    marks, since_s, longest_s = contender.marks(), began_s, 0.0
    with ThreadPoolExecutor(1) as killer:  # what is slow to kill holds up no look
        while (now_s := time.monotonic()) < began_s + lasts_s and now_s - since_s < HANGS_S:
            if len(asked) < len(kills) and now_s - began_s >= kills[len(asked)][0]:
                asked.append(killer.submit(contender.kill, kills[len(asked)][1]))
            if (new := contender.marks()) != marks:
                marks, since_s = new, now_s
            longest_s = max(longest_s, now_s - since_s)
            if now_s - began_s >= LOOK_S * len(losses):
                losses.append((round(now_s - first_s, 1), round(held_out.of(contender), 3)))
            time.sleep(0.1)
        took_s = max(lasts_s, time.monotonic() - began_s)  # after a hang nothing more is kept
        rate = (contender.tokens() - before) / took_s
    return {
        "tokens_per_s": round(rate, 2),
        "kills": sum(one.result() for one in asked),
        "longest_s": round(longest_s, 1),
        "hangs": longest_s >= HANGS_S - 1,
        "losses": losses,
    }


class Figures:
    """Of all rows of a rate of kills and a method."""

    def __init__(self, rows: Rows) -> None:
        self.groups: dict[tuple[float | None, str], list[Mapping[str, Any]]] = {}
        for row in rows:
            self.groups.setdefault((row["every_s"], row["method"]), []).append(row)
        calm = self.groups.get((None, "ddp"), [])
        self.target = statistics.median(map(self._loss_in_time, calm)) if calm else None

    @staticmethod
    def _loss_in_time(row: Mapping[str, Any]) -> float:
        """What it has after TARGET_SHARE of the time."""
        (first_s, _), (last_s, _) = row["losses"][0], row["losses"][-1]
        enough_s = first_s + TARGET_SHARE * (last_s - first_s)
        return min(loss for at_s, loss in row["losses"] if at_s <= enough_s)

    def rate(self, every_s: float | None, method: str) -> float:
        return statistics.median(row["tokens_per_s"] for row in self.groups[every_s, method])

    def shares(self, every_s: float | None, method: str) -> list[float]:
        """Of the undisturbed rate."""
        calm = self.rate(None if (None, method) in self.groups else every_s, method)
        return [row["tokens_per_s"] / calm for row in self.groups[every_s, method]]

    def time_s(self, every_s: float | None, method: str) -> float:
        """Until the target's loss; infinite where most rows do not come to it."""
        assert self.target is not None
        return statistics.median(
            next((at_s for at_s, loss in row["losses"] if loss <= self.target), math.inf)
            for row in self.groups[every_s, method]
        )

    def end_s(self, every_s: float | None, method: str) -> float:
        """The last look at a loss."""
        return min(row["losses"][-1][0] for row in self.groups[every_s, method])


def table(rows: Rows) -> Iterator[str]:
    """Markdown, of what is there."""
    figures = Figures(rows)
    heads = (
        "a kill every",
        "method",
        "useful tokens/s",
        "of its undisturbed (lowest to highest)",
        "longest pause",
        "hangs",
        "time to a loss" if figures.target is None else f"time to a loss of {figures.target:.3f}",
    )
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for (every_s, method), group in sorted(figures.groups.items(), key=lambda one: (-(one[0][0] or 1e9), one[0][1])):
        shares = [100 * share for share in figures.shares(every_s, method)]
        cells = [
            "undisturbed" if every_s is None else f"{every_s:g} s",
            CONTENDERS[method].name,
            f"{figures.rate(every_s, method):,.1f}",
            f"{statistics.median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f}, n={len(group)})",
            f"{max(row['longest_s'] for row in group):.0f} s",
            f"{sum(row['hangs'] for row in group)} of {len(group)}",
            _time_text(figures, every_s, method),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield f"{sum(row['kills'] for row in rows)} kills. {measured_on(rows)}"
    if found := list(verdicts(figures)):
        yield ""
        yield from found


def _time_text(figures: Figures, every_s: float | None, method: str) -> str:
    if figures.target is None:
        return ""
    time_s = figures.time_s(every_s, method)
    return f"{time_s:.0f} s" if time_s < math.inf else f"not in {figures.end_s(every_s, method):.0f} s"


def verdicts(figures: Figures) -> Iterator[str]:
    """A line for each goal that the rows say something about."""
    rates = sorted({every_s for every_s, method in figures.groups if every_s and method == "diloco"}, reverse=True)
    for every_s in rates:
        when = f"With a kill every {every_s:g} s `diloco`"
        if (None, "diloco") in figures.groups:
            kept = statistics.median(figures.shares(every_s, "diloco"))
            goal = f"goal: {100 * GOAL_KEPT:.0f} % or more"
            yield _verdict(kept >= GOAL_KEPT, f"{when} keeps {100 * kept:.1f} % of its undisturbed tokens/s", goal)
        if (every_s, "ddp") not in figures.groups:
            continue
        other = figures.rate(every_s, "ddp")
        over = figures.rate(every_s, "diloco") / other if other else math.inf
        goal = f"goal: {GOAL_OVER:g} times or more"
        yield _verdict(over >= GOAL_OVER, f"{when} has {over:.2f} times the tokens/s of data-parallel training", goal)
        if figures.target is not None:
            yield _time_verdict(figures, every_s, when)


def _time_verdict(figures: Figures, every_s: float, when: str) -> str:
    """Where data-parallel training never comes to the loss, its time is at least that of its last look."""
    ours, others = (figures.time_s(every_s, method) for method in ("diloco", "ddp"))
    goal = f"goal: {100 * GOAL_TIME:.0f} % or less"
    if ours == math.inf:
        return _verdict(False, f"{when} does not come to the loss in time", goal)
    bound = min(others, figures.end_s(every_s, "ddp"))
    share, most = ours / bound, "at most " if others == math.inf else ""
    known = None if most and share > GOAL_TIME else share <= GOAL_TIME
    return _verdict(known, f"{when} needs {most}{100 * share:.0f} % of data-parallel training's time to the loss", goal)


def hangs_text(rows: Rows) -> Iterator[str]:
    """Of storms of `diloco` alone: whether one hung, and how long the longest pauses were."""
    hangs, pauses_s = sum(row["hangs"] for row in rows), sorted(row["longest_s"] for row in rows)
    known = None if not hangs and len(rows) < GOAL_STORMS else not hangs
    what = f"`diloco` hung in {hangs} of {len(rows)} storms with a kill every {rows[0]['every_s']:g} s"
    yield _verdict(known, what, f"goal: in none of {GOAL_STORMS}")
    yield ""
    kills, usual_s, worst_s = sum(row["kills"] for row in rows), statistics.median(pauses_s), pauses_s[-1]
    yield f"{kills} kills; a storm's longest pause: median {usual_s:.1f} s, worst {worst_s:.1f} s. {measured_on(rows)}"


def _verdict(met: bool | None, what: str, goal: str) -> str:
    """None: too little was measured to say so."""
    return f"- {'Open' if met is None else 'Met' if met else 'Missed'}: {what} ({goal})."


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--every-s", type=float, nargs="+", default=[60.0, 15.0], help="between kills")
    parser.add_argument("--methods", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seconds", type=float, default=120.0, help="of each storm; half of it if nobody is killed")
    parser.add_argument("--hangs", type=int, metavar="N", help="only N storms of diloco, to see whether one hangs")
    parser.add_argument("--output", type=Path, help="default: storm.jsonl or hangs.jsonl, beside this file")
    options = parser.parse_args(words)
    name = "hangs" if options.hangs else "storm"
    output, same = options.output or HERE / f"{name}.jsonl", {"seconds": options.seconds}
    if options.hangs:
        alone = [StormCase("diloco", min(options.every_s), seed) for seed in range(options.hangs)]

        def without_losses(one: Any) -> dict[str, Any]:
            return {key: value for key, value in measured(StormCase(**one), options.seconds).items() if key != "losses"}

        publish(name, output, hangs_text(complete(output, map(vars, alone), same, without_losses)))
        return
    if "torchft" in options.methods and (reason := why_no_torchft()):
        print(f"left out: {TORCHFT} cannot be installed: {reason}", file=sys.stderr)
        options.methods.remove("torchft")
    storms = [
        StormCase(method, every_s, seed)
        for seed, every_s, method in product(range(options.repetitions), (None, *options.every_s), options.methods)
    ]
    rows = complete(output, map(vars, storms), same, lambda one: measured(StormCase(**one), options.seconds))
    publish(name, output, table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
