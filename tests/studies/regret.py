"""What the search for a plan misses, on small seeded inventories: python -m tests.studies.regret [--cases 20]

One to four islands as in tests/studies/plans.py. All that 17 H, 10 numbers of fragments, 3 codecs and each subset of
the islands can be goes through the planner's closed form. The best of it that keeps the planner's own limits, the best
whose links, memory and syncer just hold it, and the searched plan then run in `simulate run`'s fleet. A plan is worth
what the search says of it, with the simulator's tokens/s in place of the planner's; regret is how much less the
searched plan is worth than the best. Goals: `time` (most tokens/s, so the earliest at the target), `cost` (a token's).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from statistics import median

from diloco_cli.config.codec import replace
from diloco_cli.errors import UsageError
from diloco_cli.forecast.run import confirmed
from diloco_cli.plan.flow import Fleet, run_fleet
from diloco_cli.plan.plan import Goal
from diloco_cli.plan.planner import assemble
from diloco_cli.plan.search import FRAGMENTS, HEADROOM, LANES, SEARCHED, Point, Search, search, space_of, with_sync
from tests.studies.plans import PlanCase, case, percentile

EVERY = tuple(round(1000 ** (step / 16)) for step in range(17))
CODECS = ("bf16", "int8", "int4")
GOALS = {"time": Goal(), "cost": Goal("cost")}


@dataclass(frozen=True)
class Regret:
    """Of one case and goal: `kept` beside the best within the planner's limits, `loose` beside the best of all."""

    seed: int
    goal: str
    kept: float
    loose: float


def judge_of(base: PlanCase, goal: Goal) -> Search:
    return Search(
        base.run, base.inventory, base.model, space_of(base.run.sync, frozenset(SEARCHED), base.model), goal, 0
    )


def scan(base: PlanCase) -> Iterator[tuple[Fleet, float]]:
    """(what the islands and the syncer just hold, how much it uses of what the planner's limits leave it: 1 is all)."""
    judge = judge_of(base, Goal())
    for fragments, codec in product(FRAGMENTS, CODECS):
        if base.model.fragments(fragments).count != fragments:
            continue
        pool = judge.pool(fragments)
        busy = judge._shortest(Point((codec, codec), fragments, 1, 1), True)
        able = [i for i, candidate in enumerate(pool) if candidate.can_train]
        for every, size in product(EVERY, range(1, len(able) + 1)):
            sync = with_sync(
                base.run, fragments=fragments, codec=codec, weights_codec=codec, every=every, quorum=1
            ).sync
            for kept in combinations(able, size):
                lanes = max(busy[i] / max(every * pool[kept[0]].step_s, pool[i].step_s) for i in kept)
                if lanes > 1:
                    continue
                fleet = run_fleet([pool[i] for i in kept], sync, base.model)
                if fleet.has_room and fleet.syncer_load <= 1:
                    yield fleet, max(lanes / LANES, fleet.syncer_load / HEADROOM)


def off_percent(base: PlanCase, fleet: Fleet, known: dict[tuple[object, ...], float]) -> float:
    """By how much the planner says more than the simulator, which is asked once: what is `known` stays."""
    key = fleet.sync, *(candidate.island.name for candidate in fleet.kept)
    if key not in known:
        plan = assemble(fleet, (), replace(base.run, sync=fleet.sync), base.inventory, base.model, Goal())
        known[key] = confirmed(plan).off_percent
    return known[key]


def regrets(seed: int) -> list[Regret]:
    base, found, known = case(seed, most_islands=4), list[Regret](), dict[tuple[object, ...], float]()
    scanned = list(scan(base))
    for name, goal in GOALS.items():
        chosen = search(base.run, base.inventory, base.model, frozenset(SEARCHED), goal)
        if chosen is None or not scanned:
            continue
        judge = judge_of(base, goal)
        loose = max((fleet for fleet, _ in scanned), key=judge._valued)
        kept = max((fleet for fleet, used in scanned if used <= 1), key=judge._valued, default=chosen)
        try:
            mine, best, any_best = (
                judge._valued(fleet) / (1 + off_percent(base, fleet, known) / 100) for fleet in (chosen, kept, loose)
            )
        except UsageError as error:
            print(f"{seed:>3} {name}: {error.message}")
            continue
        found.append(Regret(seed, name, 1 - mine / max(mine, best), 1 - mine / max(mine, best, any_best)))
    return found


def told(rows: Sequence[Regret]) -> Iterator[str]:
    """Rows of the README's table."""
    for name in GOALS:
        for limits in ("kept", "loose"):
            values = [100 * getattr(row, limits) for row in rows if row.goal == name]
            if values:
                worst = f"{median(values):.1f} % | {percentile(values, 0.95):.1f} % | {max(values):.1f} %"
                yield f"| {name} | {limits} | {len(values)} | {worst} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    rows: list[Regret] = []
    for seed in range(asked.first, asked.first + asked.cases):
        for row in regrets(seed):
            rows.append(row)
            print(f"{seed:>3} {row.goal} regret {100 * row.kept:.1f} %, of all {100 * row.loose:.1f} %", flush=True)
    print("\n".join(told(rows)))


if __name__ == "__main__":
    main()
