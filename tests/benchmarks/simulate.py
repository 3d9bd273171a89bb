"""What a simulation costs: python -m tests.benchmarks.simulate [--plot FILE.svg]

Goals, for 30 days of 1.2M chips in 8 learners: <= 1 s with process start; the whole published table <= 5 s; cost grows
with failures, not with chips; of the protocol's own code, 50 histories of at least 10 commits a second on one core. CPU
seconds, so that a busy machine does not matter; the clock's beside them. Ends with status 1 and the goals that were
missed, if any was.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from diloco_cli.forecast.chips import DAY_MS, equal_learners, fleet_goodput, generator, leap
from diloco_cli.forecast.goodput import PUBLISHED, published_grid
from diloco_cli.plots import Axis, Series, line_chart, save_svg
from tests.benchmarks.measure import machine, spread
from tests.histories.campaign import Totals, swarm

CHIPS, LEARNERS, DAYS = 1_200_000, 8, 30.0
ROUNDS = 5
GRID_DAYS, GRID_SEEDS = 2.0, (0, 1, 2)
LONG_ENOUGH = 10  # commits: shorter histories hide rare bugs
CURVE_CHIPS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
GOALS = {
    "from failure to failure": 1.0,
    "the command, three methods": 1.0,
    "the published table, 3 x 2 days": 5.0,
}  # CPU seconds at most, median
HISTORIES_A_SECOND = 50.0
SCATTER = 4.0  # times between the least and the greatest cost of a failure; the chips differ a thousandfold
MANY = 1000  # failures: below that, what a history costs without any counts
Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float, float]:
    """(result, CPU seconds, seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def history(seed: int, days: float = DAYS) -> float:
    """One history of the fleet; its goodput in percent."""
    timelines = leap(equal_learners(CHIPS, LEARNERS, PUBLISHED), round(days * DAY_MS), generator(seed))
    return 100 * fleet_goodput(timelines)


def in_a_process() -> tuple[float, float]:
    """The command with process start: (CPU seconds, seconds)."""
    words = ["simulate", "goodput", "--chips", str(CHIPS), "--learners", str(LEARNERS)]
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "diloco_cli", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.perf_counter() - wall


def curve(days: float = 1.0, scaled: bool = False) -> list[tuple[int, int, float]]:
    """(chips, failures, median CPU seconds) of 8 learners. `scaled`: chips that fail the more rarely the
    more there are, in larger slices, so that the fleet has as many failures whatever its size."""
    rows = []
    for chips in CURVE_CHIPS:
        larger = chips / CURVE_CHIPS[-1] if scaled else 1.0
        slice_chips = max(1, round(PUBLISHED.slice_chips * larger))
        constants = replace(PUBLISHED, mtbi_s=PUBLISHED.mtbi_s * larger, slice_chips=slice_chips)
        fleet = equal_learners(chips, LEARNERS, constants)
        made = [timed(lambda fleet=fleet: leap(fleet, round(days * DAY_MS), generator(0))) for _ in range(ROUNDS)]  # type: ignore[misc]
        rows.append((chips, sum(timeline.failures for timeline in made[0][0]), median(cpu for _, cpu, _ in made)))
    return rows


def protocol_histories() -> tuple[list[float], Totals]:
    """(histories of at least 10 commits a CPU second, of each hundred seeds; all counts)"""
    totals, rates = Totals(), []
    for hundred in range(ROUNDS):
        done, cpu, _ = timed(lambda first=100 * hundred: swarm(range(first, first + 100)))  # type: ignore[misc]
        rates.append(sum(length >= LONG_ENOUGH for length in done.lengths) / cpu)
        totals.join(done)
    return rates, totals


def plot(rows: list[tuple[int, int, float]], scaled: list[tuple[int, int, float]]) -> str:
    """Milliseconds follow the failures, and stay level where those do."""
    lines = [
        Series("ms a simulated day", tuple((chips, 1e3 * cpu) for chips, _, cpu in rows)),
        Series("failures a day", tuple((chips, max(1, failures)) for chips, failures, _ in rows), dashed=True),
        Series("ms, failures held", tuple((chips, 1e3 * cpu) for chips, _, cpu in scaled)),
    ]
    x, y = Axis("chips, in 8 learners", log=True), Axis("milliseconds; failures", log=True)
    return line_chart("cost grows with failures, not with chips", x, y, lines)


def show(label: str, cpu: list[float], wall: list[float]) -> list[str]:
    """Prints it; the goal that it misses, if it does."""
    print(f"{label:<34} {spread(cpu, 2)} s CPU   {spread(wall, 2)} s")
    return [] if median(cpu) <= GOALS[label] else [f"{label}: {median(cpu):.2f} s CPU, at most {GOALS[label]:g}"]


def growth(rows: list[tuple[int, int, float]], scaled: list[tuple[int, int, float]]) -> list[str]:
    """Cost by failures, and at failures held; what does not follow them."""
    for (chips, failures, seconds), (_, held, level) in zip(rows, scaled, strict=True):
        print(
            f"{chips:>10,} chips {failures:>7,} failures a day {1e3 * seconds:8.2f} ms;"
            f" held at {held:,}: {1e3 * level:8.2f} ms"
        )
    missed = []
    each = [seconds / failures for _, failures, seconds in rows if failures >= MANY]
    if max(each) > SCATTER * min(each):
        missed.append(f"a failure costs {1e6 * min(each):.1f} to {1e6 * max(each):.1f} us, by the number of chips")
    levels = [seconds for _, _, seconds in scaled]
    if max(levels) > SCATTER * min(levels):
        missed.append(
            f"as many failures cost {1e3 * min(levels):.1f} to {1e3 * max(levels):.1f} ms, by the number of chips"
        )
    return missed


def main() -> None:
    print(machine())
    missed: list[str] = []
    made = [timed(lambda seed=seed: history(seed)) for seed in range(ROUNDS)]  # type: ignore[misc]
    missed += show("from failure to failure", [cpu for _, cpu, _ in made], [wall for _, _, wall in made])
    processes = [in_a_process() for _ in range(ROUNDS)]
    missed += show("the command, three methods", [cpu for cpu, _ in processes], [wall for _, wall in processes])
    _, cpu, wall = timed(lambda: list(published_grid(PUBLISHED, GRID_DAYS, GRID_SEEDS)))
    missed += show("the published table, 3 x 2 days", [cpu], [wall])
    goodputs = [goodput for goodput, _, _ in made]
    print(f"goodput {min(goodputs):.2f} to {max(goodputs):.2f} %")
    rates, totals = protocol_histories()
    print(
        f"{'the protocol, histories a second':<34} {spread(rates, 1)} of >= {LONG_ENOUGH} commits (median "
        f"{median(totals.lengths):.0f}, least {min(totals.lengths)}), "
        f"{totals.store_operations / len(totals.lengths):.0f} store calls each"
    )
    if median(rates) < HISTORIES_A_SECOND:
        missed.append(f"{median(rates):.1f} histories a CPU second, at least {HISTORIES_A_SECOND:g}")
    rows, scaled = curve(), curve(scaled=True)
    missed += growth(rows, scaled)
    if "--plot" in sys.argv:
        save_svg(Path(sys.argv[sys.argv.index("--plot") + 1]), lambda: plot(rows, scaled))
    if missed:
        sys.exit("\n".join(f"missed: {goal}" for goal in missed))


if __name__ == "__main__":
    main()
