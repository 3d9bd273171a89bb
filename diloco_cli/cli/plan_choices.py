"""Plans beside each other: with and without an island, with what can be rented, and those of which none is better in
time, money and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco_cli.cli.output import table
from diloco_cli.cli.plan_view import MOST_LINES, amount, codecs, labelled, losses, without_egress
from diloco_cli.config.inventory_file import inventory_to_text
from diloco_cli.config.settings import Inventory
from diloco_cli.errors import UsageError
from diloco_cli.plan.flow import DAY_S, FREE_STEPS, PER_DOUBLING
from diloco_cli.plan.plan import Goal, Plan
from diloco_cli.plan.renting import COUNTS, EGRESS_PER_GB, SPOT_MTBF_S, SPOT_RESTART_S, Rented, Renting
from diloco_cli.plan.search import SEARCHED
from diloco_cli.plots import Axis, Panel, panels_chart
from diloco_cli.quantities import format_count, format_duration, some_of

if TYPE_CHECKING:
    from diloco_cli.forecast.outlook import Rival

NOTABLE_PERCENT = 1.0  # less is what the count of merges may be off


@dataclass(frozen=True)
class Compared:
    """A plan, and `then` the one that a change makes of it. `now` None: nothing that trains."""

    change: str
    now: Plan | None
    then: Plan

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        now = None if self.now is None else _facts(self.now)
        return {"change": self.change, "now": now, "then": _facts(self.then)}


def _facts(plan: Plan) -> dict[str, Any]:
    """`islands` that take part of `islands_there`; `limited_by` takes `limited_percent` of the speed, or is busy for so
    much of its slot."""
    limit, percent = _limit(plan)
    return {
        **{key: value(plan) for key, value, _ in NUMBERS.values()},
        "loss_percent": plan.prediction.loss_percent,
        "islands": len(plan.islands),
        "islands_there": len(plan.inventory.islands),
        "sync": _searched(plan),
        "limited_by": limit,
        "limited_percent": percent,
    }


def _searched(plan: Plan) -> dict[str, Any]:
    return {key: getattr(plan.run.sync, key) for key in SEARCHED}


def _limit(plan: Plan) -> tuple[str, float]:
    """What limits the speed most, in percent."""
    if plan.syncer.busy_percent > 100:
        return SYNCER, plan.syncer.busy_percent
    name, share = next(iter(losses(plan)), ("the accelerators", 0.0))
    return name, 100 * share


def _texts(plan: Plan, other: Plan) -> dict[str, str]:
    """In words, what is no number of `NUMBERS`; beside another plan."""
    s, (limit, percent) = plan.schedule, _limit(plan)
    much = f", {percent:.0f} % busy" if limit == SYNCER else f" -{percent:.1f} %" if percent else ""
    return {
        "islands": _who(plan, other),
        "exchange": f"each {s.sync_every} steps, {s.fragments} fragments, {codecs(plan)}",
        "limited by": f"{limit}{much}",
    }


SYNCER, MONEY = "the syncer", "in all"
NUMBERS: Mapping[str, tuple[str, Callable[[Plan], float], Callable[[float], str]]] = {
    "time": ("days_to_target", lambda plan: plan.prediction.days_to_target, lambda days: format_duration(days * DAY_S)),
    "tok/s": ("tokens_per_s", lambda plan: plan.prediction.tokens_per_s, format_count),
    MONEY: ("total", lambda plan: plan.money.total, amount),
}


def compared_text(compared: Compared) -> str:
    """A line for each thing that people ask for; of the rest, what is different."""
    if compared.now is None:
        return f"{'now':<11}nothing that trains"
    both = compared.now, compared.then
    rows = [("", "now", compared.change, "")]
    for label, (_, value, text) in NUMBERS.items():
        before, after = map(value, both)
        if before and after and (label != MONEY or any(plan.money.is_priced for plan in both)):
            lacking = [without_egress(plan) if label == MONEY else "" for plan in both]
            cells = text(before) + lacking[0], text(after) + lacking[1]
            rows.append((label, *cells, "" if any(lacking) else f"{100 * (after / before - 1):+.1f} %"))
    before_percent, after_percent = (plan.prediction.loss_percent for plan in both)
    if {before_percent, after_percent} != {None}:
        rows.append(("loss", _loss(before_percent), _loss(after_percent), ""))
    now, then = (_texts(*pair) for pair in (both, both[::-1]))
    rows += [(key, now[key], then[key], "") for key in now if now[key] != then[key] or key == "limited by"]
    return "\n".join(table(rows) + _of_longer_rounds(*both))


def _who(plan: Plan, other: Plan) -> str:
    """Who takes part; of many, how many, and who of the other plan does not."""
    names = [island.name for island in plan.islands]
    if len(names) <= MOST_LINES:
        return ", ".join(names)
    missing = [island.name for island in other.islands if island.name not in set(names)]
    return f"{len(names):,} of {len(plan.inventory.islands):,}" + (f", not {some_of(missing)}" if missing else "")


def _of_longer_rounds(now: Plan, then: Plan) -> list[str]:
    """What the search counts and no figure shows, where two plans differ in it."""
    steps = [plan.schedule.sync_every for plan in (now, then)]
    if steps[0] == steps[1] or max(steps) <= FREE_STEPS:
        return []
    cost = f"a doubling of H beyond {FREE_STEPS} as {100 * PER_DOUBLING:.0f} % of the tokens"
    return labelled({"not in it": f"the search counts {cost}, neither time nor loss here does"}).splitlines()


def _loss(percent: float | None) -> str:
    return "?" if percent is None else f"{percent:+.1f} %"


def rival_rows(rivals: Sequence[Rival]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "islands": [island.name for island in rival.plan.islands],
            "sync": _searched(rival.plan),
            "tokens_per_s": rival.tokens_per_s,
            "better_percent": rival.better_percent,
        }
        for rival in rivals
    ]


def rivals_text(plan: Plan, rivals: Sequence[Rival]) -> str:
    """Whether another plan is better in virtual time, and how it is had."""
    if not rivals:
        return labelled({"rivals": "none that is nearly as good was played"})
    if rivals[0].better_percent < NOTABLE_PERCENT:
        return labelled({"rivals": f"of {len(rivals)} that are nearly as good none is better in virtual time"})
    best = rivals[0]
    sync, own, free = best.plan.run.sync, plan.run.sync, {item.name for item in plan.settings if not item.pinned}
    asked = [key for key in SEARCHED if getattr(sync, key) != getattr(own, key)]
    asked += ["every"] if asked and "every" not in asked and "sync.every" in free else []  # or it is searched anew
    names, there = ({island.name for island in each.islands} for each in (best.plan, plan))
    ways = [f"--set sync.{key}={getattr(sync, key)}" for key in asked]
    ways += [f"--without {name}" for name in sorted(there - names)]
    ways += [f"--with {name}" for name in sorted(names - there)]
    return labelled({"rivals": f"{' '.join(ways)}: {best.better_percent:+.1f} % in virtual time"})


def renting_text(renting: Renting, compared: Compared | None) -> str:
    """What to rent, and what that changes; then the best in another region, on other terms, of another kind."""
    if compared is None:
        now = _when(renting.now) if renting.now else "nothing that trains"
        return f"rent       nothing: the best plan is without\nnow        {now}, at the fastest"
    best, *others = renting.proposals
    said: dict[str, str] = {}
    alike = [other for other in others if other.machine.accelerators == best.machine.accelerators]
    of = {
        "elsewhere": (
            o for o in alike if o.machine.spot == best.machine.spot and o.machine.region != best.machine.region
        ),
        "on demand" if best.machine.spot else "as spot": (o for o in alike if o.machine.spot != best.machine.spot),
        "other kind": (o for o in others if o.machine.accelerators.name != best.machine.accelerators.name),
    }
    for label, found in of.items():
        if other := next(found, None):
            said[label] = f"{_rented(other)}: {_when(other.plan)}{_instead(other.plan, renting.now)}"
    guesses = ["fast links between the rented machines"]
    if best.machine.spot and best.machine.interruptions_per_day is None:
        guesses.append(
            f"a spot machine is taken away each {format_duration(SPOT_MTBF_S)}, for {format_duration(SPOT_RESTART_S)}"
        )
    if best.entry.egress_per_gb and best.machine.region != renting.inventory.store.region:
        guesses.append(f"what it sends out of its region costs {EGRESS_PER_GB:g}/GB")
    if best.count == COUNTS[-1]:
        guesses.append(f"no more than {COUNTS[-1]} machines were tried")
    said["guessed"] = "; ".join(guesses)
    return "\n\n".join(
        (labelled({"rent": _rented(best) + _instead(best.plan, renting.now)}), compared_text(compared), labelled(said))
    )


def _rented(rented: Rented) -> str:
    machine = rented.machine
    name, terms = f"{machine.accelerators.name}:{machine.accelerators.count}", "spot" if machine.spot else "on demand"
    which = ", ".join(filter(None, (machine.instance, machine.zone, f"{machine.price_per_h:g}/h each")))
    return f"{rented.count} x {name} {terms} in {machine.region} ({which})"


def _when(plan: Plan) -> str:
    days, count = format_duration(plan.prediction.days_to_target * DAY_S), len(plan.islands)
    loss = f", loss {plan.prediction.loss_percent:+.1f} %" if plan.prediction.loss_percent else ""
    busy, every = plan.syncer.busy_percent, plan.schedule.sync_every
    late = f", but the syncer {busy:.0f} % busy with sync.every={every}" if busy > 100 else ""
    return f"{days}, {amount(plan.money.total)} in all{without_egress(plan)}, {_islands(count)}{loss}{late}"


def _instead(plan: Plan, now: Plan | None) -> str:
    """Whom of the plan without it an offer leaves out."""
    there = {island.name for island in plan.islands}
    gone = [island.name for island in now.islands if island.name not in there] if now else []
    return f", instead of {some_of(gone)}" if gone else ""


def frontier_rows(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "days_to_target": plan.prediction.days_to_target,
            "total": plan.money.total,
            "per_h": plan.money.per_h,
            "loss_percent": plan.prediction.loss_percent,
            "islands": [island.name for island in plan.islands],
            "goal": goal_words(plan.goal),
        }
        for plan in plans
    ]


def frontier_svg(plans: Sequence[Plan]) -> str:
    """Money against time, and loss against time, as far as they are known; a point is a line of the table. Raises
    UsageError where neither is."""
    found = [(p.prediction.days_to_target, p.money.total, p.prediction.loss_percent, len(p.islands)) for p in plans]
    panels = []
    if any(total for _, total, _, _ in found):
        texts = [", ".join([*([] if loss is None else [_loss(loss)]), _islands(count)]) for _, _, loss, count in found]
        points = [(days, total, text) for (days, total, _, _), text in zip(found, texts, strict=True)]
        panels.append(Panel(Axis(f"money in all{_lacking(plans)}", low=0), tuple(points)))
    if losses_ := [(days, loss, count) for days, _, loss, count in found if loss is not None]:
        points = [(days, loss, "" if panels else _islands(count)) for days, loss, count in losses_]
        panels.append(Panel(Axis("loss over data-parallel, %"), tuple(points)))
    if not panels:
        problem = "nothing to draw but time: no island has a price, and no trial tells the loss"
        raise UsageError(problem, hint="diloco plan --frontier, without --plot")
    title = f"{plans[0].run.name}: plans of which none is better in time, money and loss"
    return panels_chart(title, Axis("days to the target", log=True), panels)


def _islands(count: int) -> str:
    return f"{count} island{'s' * (count > 1)}"


def frontier_text(plans: Sequence[Plan]) -> str:
    """A line for each, with what asks for it."""
    rows = [("time", "in all", "per h", "loss", "islands", "asked for by")]
    for plan in plans:
        loss = "?" if plan.prediction.loss_percent is None else f"{plan.prediction.loss_percent:+.1f} %"
        names = [island.name for island in plan.islands]
        which = ", ".join(names) if len(names) <= MOST_LINES else f"{len(names)} of {len(plan.inventory.islands)}"
        time = format_duration(plan.prediction.days_to_target * DAY_S)
        total, per_h = amount(plan.money.total), f"{plan.money.per_h:.2f}"
        rows.append((time, total, per_h, loss, which, goal_words(plan.goal)))
    lacking = _lacking(plans)
    return "\n".join([*table(rows, left=(4, 5)), *([f"money is{lacking}"] if lacking else [])])


def _lacking(plans: Sequence[Plan]) -> str:
    return max((without_egress(plan) for plan in plans), key=len)


def goal_words(goal: Goal) -> str:
    words = [f"--objective {goal.objective}"]
    if goal.budget_per_h is not None:
        words.append(f"--budget {_in_full(goal.budget_per_h)}/h")
    if goal.budget_total is not None:
        words.append(f"--budget {_in_full(goal.budget_total)}/run")
    if goal.deadline_s is not None:
        words.append(f"--deadline '{_in_full(goal.deadline_s / DAY_S)} d'")
    words += [f"--with {name}" for name in goal.with_islands]
    words += [f"--without {name}" for name in goal.without_islands]
    return " ".join(words)


def _in_full(number: float) -> str:
    """Without exponent."""
    return f"{number:.9f}".rstrip("0").rstrip(".")


def rented_entry(renting: Renting) -> str:
    """As an inventory has it."""
    if not renting.proposals:
        return ""
    alone = Inventory(renting.inventory.store, machines=(renting.proposals[0].entry,))
    text = inventory_to_text(alone, {}).partition("machines:")[2].rstrip()
    return f"for the inventory, once they are yours (infra: what starts them):\nmachines:{text}"
