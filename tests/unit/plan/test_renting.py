"""What to rent: the best number of the best machine, for a deadline or a budget."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.models import ModelFacts, facts_from_numbers
from diloco_cli.config.prices import Rentable
from diloco_cli.config.settings import Inventory, RunSettings, StoreSettings
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.plan.plan import Goal
from diloco_cli.plan.renting import COUNTS, Rental, Renting, Wish, made, read_wish, renting
from tests.unit.plan.fleets import IOWA, MODEL, OLD, RUN, with_sync

DAY_S = 86_400.0
H100 = Accelerators("H100-SXM", 8)
OWN = Inventory(StoreSettings("gs://bucket", region="here"), (IOWA, OLD))
NOTHING = replace(OWN, islands=())
ON_DEMAND = Rentable("big", H100, "here", "", 30.0)
SPOT = Rentable("big", H100, "here", "", 12.0, spot=True)


PINNED = {f"sync.{key}": "run.yaml:1" for key in ("codec", "weights_codec", "fragments")}  # what is rented is searched


def rental(inventory: Inventory = OWN, model: ModelFacts = MODEL, run: RunSettings = RUN) -> Rental:
    return Rental(run, inventory, model, PINNED)


def best(goal: Goal, *machines: Rentable, inventory: Inventory = OWN, wish: Wish | None = None):
    return renting(rental(inventory), machines, wish or Wish(), goal, "prices.csv")


@pytest.mark.parametrize("inventory", [OWN, NOTHING])
def test_for_a_deadline_it_is_the_cheapest_number_of_machines_that_meets_it(inventory: Inventory) -> None:
    goal = Goal("cost", deadline_s=0.8 * DAY_S)
    found = best(goal, ON_DEMAND, inventory=inventory).proposals[0]
    assert found.plan.prediction.days_to_target <= 0.8
    each = {count: rental(inventory).rented(ON_DEMAND, count, goal) for count in COUNTS}
    totals = {count: rented.plan.money.total for count, rented in each.items() if rented}
    assert found.plan.money.total == pytest.approx(min(totals.values()), rel=0.001)
    assert found.count == min(totals, key=totals.__getitem__) > 1


def test_a_budget_is_kept_and_more_of_it_is_never_slower() -> None:
    days = []
    for budget in (1_000.0, 2_000.0, 4_000.0):
        found = best(Goal(budget_per_h=budget / 24), ON_DEMAND, inventory=NOTHING).proposals[0]
        assert found.plan.money.per_h <= budget / 24
        days.append(found.plan.prediction.days_to_target)
    assert days == sorted(days, reverse=True) and days[0] > days[-1]


def test_spot_machines_that_are_taken_away_often_are_not_worth_their_price() -> None:
    goal = Goal("cost", deadline_s=2 * DAY_S)
    calm, hectic = (replace_rate(SPOT, rate) for rate in (0.5, 200.0))
    assert best(goal, ON_DEMAND, calm, inventory=NOTHING).proposals[0].machine == calm
    assert best(goal, ON_DEMAND, hectic, inventory=NOTHING).proposals[0].machine == ON_DEMAND


def replace_rate(machine: Rentable, per_day: float) -> Rentable:
    return Rentable(
        machine.instance, machine.accelerators, machine.region, machine.zone, machine.price_per_h, True, per_day
    )


def test_a_region_is_cheaper_only_if_what_leaves_it_costs_less_than_its_price_saves() -> None:
    goal = Goal("cost", deadline_s=2 * DAY_S)
    far, near = (Rentable("big", H100, region, "", price) for region, price in (("far", 29.8), ("here", 30.0)))
    found = best(goal, far, near, inventory=NOTHING).proposals
    assert [rented.machine.region for rented in found] == ["here", "far"]
    assert best(goal, replace_price(far, 15.0), near, inventory=NOTHING).proposals[0].machine.region == "far"


def replace_price(machine: Rentable, price_per_h: float) -> Rentable:
    return Rentable(machine.instance, machine.accelerators, machine.region, machine.zone, price_per_h, machine.spot)


def test_nothing_is_rented_where_what_is_there_is_best() -> None:
    free = replace(OWN, islands=(replace(IOWA, price_per_h=0.0),))
    found = best(Goal("cost", deadline_s=30 * DAY_S), ON_DEMAND, inventory=free)
    assert found.proposals == () and found.inventory == free
    assert found.goal == Goal(deadline_s=30 * DAY_S)  # without any price the fastest is the cheapest
    priced = best(Goal("cost", deadline_s=30 * DAY_S), replace_price(ON_DEMAND, 300.0))
    assert priced.proposals == () and priced.goal == Goal("cost", deadline_s=30 * DAY_S)


def test_what_is_wished_is_planned_whatever_is_best() -> None:
    wish = read_wish("H100:8@here x2 spot", {})
    assert wish == Wish(H100, "here", 2, True)
    (found,) = best(Goal(), ON_DEMAND, SPOT, wish=wish).proposals
    assert (found.machine, found.count) == (SPOT, 2)
    assert best(Goal(), ON_DEMAND, SPOT, wish=read_wish("H100:8", {})).proposals[0].count == 1
    assert read_wish("auto", {}) == Wish()


@pytest.mark.parametrize("text", ["", "H100", "H100:0x", "H100:8 @here", "H100:8 2x", "H100:8 x0"])
def test_a_wish_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--add"):
        read_wish(text, {})


def test_what_is_not_listed_names_all_of_its_kind_and_the_way_to_an_own_price() -> None:
    machines = [Rentable("big", Accelerators("H100-SXM", 2**n), f"r{n}", "", 9.0) for n in range(8)]
    other = Rentable("old", Accelerators("V100-SXM2-16GB", 8), "here", "", 9.0)
    with pytest.raises(UsageError) as caught:
        best(Goal(), other, *machines, wish=Wish(Accelerators("H100-SXM", 3)))
    hint = str(caught.value.hint)
    assert all(f"H100-SXM:{2**n}@r{n}" in hint for n in range(8)) and "V100" not in hint
    assert hint.endswith(
        "--prices FILE, a CSV that begins with InstanceType,AcceleratorName,AcceleratorCount,Price,Region"
    )


def test_what_is_not_listed_names_what_is() -> None:
    with pytest.raises(UsageError, match="no such machine is listed") as caught:
        best(Goal(), ON_DEMAND, wish=Wish(region="there"))
    assert "H100-SXM:8@here" in str(caught.value.hint)
    with pytest.raises(UsageError, match="until when, or for how much"):
        best(Goal(), ON_DEMAND)


@pytest.mark.parametrize("goal", [Goal("cost", deadline_s=60.0), Goal(budget_total=10.0), Goal(budget_per_h=1.0)])
def test_a_limit_that_nothing_meets_names_one_that_something_does(goal: Goal) -> None:
    with pytest.raises(InfeasibleError, match="nothing of what is listed") as caught:
        best(goal, ON_DEMAND, inventory=NOTHING)
    value, unit = str(caught.value.hint).split("'")[1].split() if goal.deadline_s else (None, None)
    if value:
        assert unit == "d"
        met = replace(goal, deadline_s=float(value) * DAY_S)
    else:
        amount = float(str(caught.value.hint).split()[1].split("/")[0])
        met = replace(goal, **{"budget_total" if goal.budget_total else "budget_per_h": amount})
    assert best(met, ON_DEMAND, inventory=NOTHING).proposals


def test_machines_that_learners_do_not_train_on_are_not_proposed() -> None:
    tpu = Rentable("tpu", Accelerators("TPU-v5e", 8), "here", "", 1.0)
    assert best(Goal("cost", deadline_s=2 * DAY_S), tpu, ON_DEMAND).proposals[0].machine == ON_DEMAND


def test_what_the_syncer_cannot_hold_comes_last() -> None:
    """With H given: faster machines finish it sooner, in rounds that are later than planned."""
    origins = {"sync.every": "run.yaml:1", "sync.fragments": "run.yaml:2"}
    run = replace(RUN, sync=replace(RUN.sync, every=8))
    slow = Rentable("small", Accelerators("A100-80GB-SXM", 1), "here", "", 60.0)
    found = renting(
        Rental(run, NOTHING, MODEL, origins), [ON_DEMAND, slow], Wish(), Goal(budget_per_h=61.0), ""
    ).proposals
    assert [rented.machine for rented in found] == [slow, ON_DEMAND]
    assert found[0].plan.syncer.busy_percent <= 100 < found[1].plan.syncer.busy_percent
    assert found[0].plan.prediction.days_to_target > found[1].plan.prediction.days_to_target


def test_machines_rented_before_keep_their_name() -> None:
    first = rental().entry(ON_DEMAND, 2)
    again = rental(rental().with_rented(first)).entry(SPOT, 4)
    assert (first.name, again.name, again.fabric) == ("rented", "rented-2", "rented-2")


def test_machines_too_slow_for_the_deadline_do_not_hide_larger_ones() -> None:
    sizes = [Rentable(f"h{n}", Accelerators("H100-SXM", n), "here", "", 4.0 * n) for n in (1, 2, 3, 8)]
    goal = Goal("cost", deadline_s=0.15 * DAY_S)
    slow = [Rentable(n, Accelerators(n, 1), "here", "", 0.01) for n in ("L4", "RTX-4090", "V100-SXM2-16GB")]
    found = best(goal, *slow, *sizes, inventory=NOTHING).proposals
    assert {rented.machine.accelerators.count for rented in found} == {8}


def test_what_is_there_and_cannot_train_alone_takes_part_beside_what_is_rented() -> None:
    alone = replace(OWN, islands=(IOWA,))
    two = rental(alone, run=with_sync(quorum=2))
    two = Rental(two.run, alone, MODEL, {"sync.quorum": "run.yaml:1"})
    assert two.now is None
    (found,) = renting(two, [ON_DEMAND], Wish(H100, machines=1), Goal(), "").proposals
    assert [island.name for island in found.plan.islands] == ["iowa", "rented"]


V100 = Rentable("old", Accelerators("V100-SXM2-16GB", 8), "here", "", 3.0)
LARGE = facts_from_numbers(13_000_000_000, 40, 5120, 2048)


def test_machines_that_do_not_hold_the_model_do_not_hide_those_that_do() -> None:
    cheap = ("V100-SXM2-16GB", "T4", "L4")
    small = [Rentable(name, Accelerators(name, 1), "here", "", 0.01) for name in cheap]
    found = renting(rental(NOTHING, LARGE), [*small, ON_DEMAND], Wish(machines=1), Goal(budget_total=1e7), "").proposals
    assert [rented.machine for rented in found] == [ON_DEMAND]


@pytest.mark.parametrize("limits", [Goal(), Goal("cost", deadline_s=900 * DAY_S), Goal(budget_total=1e7)])
@pytest.mark.parametrize("inventory", [OWN, NOTHING])
def test_a_machine_that_does_not_hold_the_model_is_refused_with_that_reason(inventory: Inventory, limits: Goal) -> None:
    with pytest.raises(InfeasibleError, match="the model does not fit 8 x V100-SXM2-16GB") as caught:
        renting(rental(inventory, LARGE), [V100], Wish(V100.accelerators, machines=1), limits, "prices.csv")
    start = "these machines would not take part" if inventory == OWN else "no island can take part"
    assert caught.value.message.startswith(start) and "GB" in str(caught.value.hint)


def test_what_the_whole_search_does_without_is_not_rented() -> None:
    """Proposals of the short search: one too dear for the goal, and one as cheap as can be."""
    goal, own = Goal("cost"), rental(replace(OWN, islands=(IOWA,)))
    dear, cheap = (own.rented(replace_price(ON_DEMAND, price), 2, Goal()) for price in (3000.0, 1.0))
    assert dear and cheap
    proposed = Renting((dear, cheap), own.now, own.with_rented(dear.entry), goal)
    plan, chosen = made(own, proposed)
    assert [rented.machine for rented in chosen.proposals] == [cheap.machine]
    assert chosen.proposals[0].plan is plan and own.rented_in(plan) == chosen.proposals[0].count == 2
    plan, chosen = made(own, Renting((dear,), own.now, proposed.inventory, goal))
    assert chosen.proposals == () and [island.name for island in plan.islands] == ["iowa"]


def test_spot_machines_that_are_never_taken_away_count_as_such() -> None:
    assert rental().entry(replace_rate(SPOT, 0.0), 1).mtbf_s is None
    assert rental().entry(SPOT, 1).mtbf_s == DAY_S
