"""How well searched plans come true, on seeded inventories: python -m tests.studies.plans [--inventories 60]

One to twelve islands of five kinds, 10 Mbit/s to 100 Gbit/s, 1 to 300 ms, models of 85M to 70B parameters. For each:
the plan's tokens/s (before failures) over those of the same run in `simulate run`'s fleet (no failures, after its first
rounds), whether the plan overloads its syncer, the seconds that planning took. Then how often a property is broken that
every best plan has: what only adds to the choices makes no plan worse.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.models import ModelFacts, facts_from_numbers
from diloco_cli.config.settings import (
    Inventory,
    IslandSettings,
    Link,
    ModelSettings,
    RunSettings,
    StoreSettings,
    TrainSettings,
)
from diloco_cli.errors import InfeasibleError
from diloco_cli.forecast.run import confirmed
from diloco_cli.plan.flow import Fleet
from diloco_cli.plan.plan import Goal, Plan
from diloco_cli.plan.planner import make_plan
from diloco_cli.plan.search import MAX_WORK, SEARCHED, Point, Search, space_of

KINDS = (("H100-SXM", 8), ("A100-80GB-SXM", 8), ("L40S", 4), ("RTX-4090", 2), ("V100-SXM2-32GB", 8))
MODELS = ((85_000_000, 12, 768), (350_000_000, 24, 1024), (1_000_000_000, 16, 2048), (7_000_000_000, 32, 4096),
          (70_000_000_000, 80, 8192))  # fmt: skip
SEQUENCE = 2048
SAME = 0.995  # a score that falls by less is no worse


@dataclass(frozen=True)
class PlanCase:
    """What a plan is made of; `goal`: what it is searched for."""

    run: RunSettings
    inventory: Inventory
    model: ModelFacts
    goal: Goal = field(default_factory=Goal)

    def plan(self) -> Plan | None:
        try:
            return make_plan(self.run, self.inventory, self.model, self.goal, origins={})
        except InfeasibleError:
            return None

    @cached_property
    def found(self) -> Search:
        """The plan's search, with what it found: its best fleet, and what that is worth by the goal."""
        attempt = Search(
            self.run,
            self.inventory,
            self.model,
            space_of(self.run.sync, frozenset(SEARCHED), self.model),
            self.goal,
            MAX_WORK,
        )
        attempt.search(frozenset())
        return attempt


def case(seed: int, most_islands: int = 12) -> PlanCase:
    draw = random.Random(seed)
    parameters, layers, width = draw.choice(MODELS)
    big = 1 + 3 * (parameters > 5e9) + 12 * (parameters > 5e10)
    islands = tuple(_island(draw, number, big) for number in range(draw.randint(1, most_islands)))
    store = Link(None, None, rtt_s=10 ** draw.uniform(-3, -0.52)) if draw.random() < 0.7 else Link()
    model = ModelSettings(parameters=parameters, layers=layers, width=width, sequence=SEQUENCE)
    train = TrainSettings(tokens=100 * parameters, batch_tokens=SEQUENCE * 128)
    inventory = Inventory(StoreSettings("gs://bucket", region="r0", link=store), islands)
    return PlanCase(
        RunSettings("study", model=model, train=train),
        inventory,
        facts_from_numbers(parameters, layers, width, SEQUENCE),
    )


def _island(draw: random.Random, number: int, nodes: int) -> IslandSettings:
    kind, count = draw.choice(KINDS)
    size = nodes * draw.choice((1, 2, 4))
    up, down = (10 ** draw.uniform(7, 11) for _ in range(2))
    return IslandSettings(
        name=f"i{number}",
        region=f"r{draw.randrange(3)}",
        accelerators=Accelerators(kind, count),
        nodes=size,
        infra="slurm/p",
        batch_tokens=SEQUENCE * size * count * draw.choice((1, 2, 4, 16)),
        link=Link(up, down, 10 ** draw.uniform(-3, -0.52)),
        mtbf_s=draw.choice((None, 3600.0 * 10 ** draw.uniform(0.5, 2.5))),
        price_per_h=round(draw.uniform(1, 60) * size, 2),
        egress_per_gb=draw.choice((0.0, 0.02, 0.08)),
        mfu=draw.uniform(0.25, 0.5),
    )


def worth_of(fleet: Fleet, judge: Search) -> float:
    """What a fleet that another search found is worth to this one, limits and rounds included: larger is better."""
    sync, names = fleet.sync, {candidate.island.name for candidate in fleet.kept}
    kept = tuple(i for i, c in enumerate(judge.pool(sync.fragments)) if c.island.name in names)
    return judge.worth(kept, Point((sync.codec, sync.weights_codec), sync.fragments, sync.every, sync.quorum))


def variations(base: PlanCase, cheapest: PlanCase, seed: int) -> Iterator[tuple[str, PlanCase, PlanCase]]:
    """(what only adds to the choices, without it, with it). `cheapest`: the base, for the least money."""
    draw, inventory, islands = random.Random(1000 + seed), base.inventory, list(base.inventory.islands)
    one = draw.randrange(len(islands))

    def having(changed: list[IslandSettings], goal: Goal | None = None) -> PlanCase:
        return replace(base, inventory=replace(inventory, islands=tuple(changed)), goal=goal or base.goal)

    def with_one(goal: Goal | None = None, **changed: object) -> PlanCase:
        other = list(islands)
        other[one] = replace(islands[one], **changed)
        return having(other, goal)

    link, cost = islands[one].link, cheapest.goal
    more = replace(_island(draw, len(islands), islands[0].nodes), name="more")
    yield "one more island", base, having([*islands, more])
    yield (
        "a faster link",
        base,
        with_one(link=replace(link, up_bps=3 * (link.up_bps or 1), down_bps=3 * (link.down_bps or 1))),
    )
    yield "half the rtt", base, with_one(link=replace(link, rtt_s=(link.rtt_s or 0) / 2))
    yield "fewer failures", base, with_one(mtbf_s=None)
    whole = sum(island.price_per_h for island in islands)
    yield (
        "a larger budget",
        having(islands, Goal(budget_per_h=whole / 2)),
        having(islands, Goal(budget_per_h=whole * 0.7)),
    )
    yield "a cheaper price", cheapest, with_one(cost, price_per_h=islands[one].price_per_h / 2)
    yield "no egress", cheapest, having([replace(i, egress_per_gb=0.0) for i in islands], cost)
    yield "a later deadline", *(having(islands, Goal("cost", deadline_s=days * 86_400)) for days in (30, 60))


@dataclass(frozen=True)
class PlanRow:
    seed: int
    plan: Plan
    seconds: float
    ratio: float

    @property
    def overloaded(self) -> bool:
        return self.plan.syncer.busy_percent > 100.0001


def rows(seeds: range, simulate: bool) -> Iterator[PlanRow]:
    for seed in seeds:
        began = time.process_time()
        plan = case(seed).plan()
        seconds = time.process_time() - began
        if plan is not None:
            ratio = 1 + confirmed(plan).off_percent / 100 if simulate else 1.0
            yield PlanRow(seed, plan, seconds, ratio)


def broken(seed: int) -> Iterator[tuple[str, float]]:
    """The properties that are broken, and how much worse the plan is (a factor)."""
    base = case(seed)
    cheapest = replace(base, goal=Goal("cost"))
    for name, without, with_it in variations(base, cheapest, seed):
        first, second = without.found.best_worth, with_it.found.best_worth
        if second < SAME * first:
            yield name, second / first
    if base.found.best is not None:
        ratio = cheapest.found.best_worth / worth_of(base.found.best, cheapest.found)
        if ratio < SAME:
            yield "the cost objective is the cheapest", ratio


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inventories", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--properties", type=int, default=0)
    parser.add_argument("--no-simulation", action="store_true")
    asked = parser.parse_args()
    found = []
    for row in rows(range(asked.first, asked.first + asked.inventories), not asked.no_simulation):
        found.append(row)
        p, s = row.plan, row.plan.schedule
        print(
            f"{row.seed:>3} {p.model.parameters / 1e6:>6.0f}M {len(p.islands):>2}/{len(p.inventory.islands):<2}"
            f" H {s.sync_every:>5} P {s.fragments:>3} {s.codec}/{s.weights_codec} tau {s.overlap} K {s.quorum}"
            f" busy {p.syncer.busy_percent:>4.0f} % goodput {100 * p.prediction.goodput:>5.1f} % over {row.ratio:.3f}"
            f" {row.seconds:.2f} s",
            flush=True,
        )
    if found:
        apart = [abs(row.ratio - 1) for row in found]
        print(
            f"{len(found)} plans; plan over simulator: median {median(row.ratio for row in found):.3f}, apart: median"
            f" {100 * median(apart):.1f} %, 95 % {100 * percentile(apart, 0.95):.1f} %, worst {100 * max(apart):.1f} %;"
            f" overloaded {sum(row.overloaded for row in found)}; planning {sum(row.seconds for row in found):.1f} s"
        )
    counts: dict[str, list[tuple[int, float]]] = {}
    for seed in range(asked.first, asked.first + asked.properties):
        for name, ratio in broken(seed):
            counts.setdefault(name, []).append((seed, ratio))
            print(f"{seed:>3} {name}: x {ratio:.3f}", flush=True)
    for name, cases in counts.items():
        print(f"{name}: {len(cases)} of {asked.properties}, worst x {min(ratio for _, ratio in cases):.2f}")


if __name__ == "__main__":
    main()
