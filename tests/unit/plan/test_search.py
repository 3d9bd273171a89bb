"""The search: what is pinned stays, few islands are searched exactly, limits hold, and the hints lead to a plan."""

from __future__ import annotations

import re
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import Link
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.plan import islands as searching
from diloco_cli.plan import planner
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.flow import run_fleet
from diloco_cli.plan.islands import SEARCHED, _halvings, carried, score, search
from diloco_cli.plan.link import CODEC_BITS, load_of_round
from diloco_cli.plan.plan import Goal
from diloco_cli.plan.planner import make_plan
from tests.unit.plan.fleets import FAST, HOME, IOWA, MODEL, OLD, RUN, SPOT, fleet, island, with_sync

FREE: dict[str, str] = {}  # origins of a run file that pins nothing


def pinned(**changed: object) -> dict[str, str]:
    return {f"sync.{key}": f"run.yaml:{line}" for line, key in enumerate(changed, start=1)}


def test_what_the_run_file_pins_is_not_searched_and_the_plan_says_who_pinned_it() -> None:
    run = with_sync(every=100, codec="bf16")
    plan = make_plan(run, fleet(), MODEL, origins=pinned(every=1, codec=1, weights_codec=1))
    by_name = {setting.name: setting for setting in plan.settings}
    assert plan.run.sync.every == 100
    assert (by_name["sync.every"].pinned, by_name["sync.every"].origin) == (True, "run.yaml:1")
    assert not by_name["sync.fragments"].pinned
    assert {setting.name for setting in plan.settings} == {f"sync.{key}" for key in SEARCHED}


def test_a_free_search_lengthens_the_round_until_the_slow_link_carries_it_if_that_pays() -> None:
    big_home = replace(HOME, accelerators=IOWA.accelerators, batch_tokens=524_288)  # half of the fleet's tokens
    plan = make_plan(with_sync(every=24), fleet(IOWA, big_home), MODEL, origins=FREE)
    assert {planned.name for planned in plan.islands} == {"iowa", "home"}
    home = next(planned for planned in plan.islands if planned.name == "home")
    assert home.up_mbps_available is not None
    assert home.up_mbps_needed <= home.up_mbps_available
    assert plan.run.sync.every > 24 or plan.run.sync.codec != "bf16"


def test_a_slow_link_for_few_tokens_is_left_out_rather_than_paid_for_by_all() -> None:
    plan = make_plan(RUN, fleet(), MODEL, origins=FREE)
    assert [left.name for left in plan.excluded] == ["home"]
    assert plan.run.sync.codec == "bf16"


def test_an_island_with_short_steps_does_not_ruin_the_round_of_the_others() -> None:
    quick = island("quick", "L40S", 1, 2048)
    narrow = replace(IOWA, link=Link(up_bps=180e6, down_bps=180e6))
    plan = make_plan(with_sync(every=100), fleet(narrow, quick), MODEL)
    assert [planned.name for planned in plan.islands] == ["iowa"]
    (left,) = plan.excluded
    assert "would set a round of" in left.reason
    assert "too short for the link of iowa" in left.reason
    batch = int(left.suggestions[0].removeprefix("batch_tokens: "))
    again = make_plan(with_sync(every=100), fleet(narrow, replace(quick, batch_tokens=batch)), MODEL)
    assert not again.excluded


@pytest.mark.parametrize(
    "goal", [Goal(), Goal("cost"), Goal(budget_per_h=40.0), Goal("cost", deadline_s=20 * 86_400.0)]
)
def test_few_islands_are_searched_exactly(goal: Goal) -> None:
    """Against a plain enumeration of everything that the search may choose, written without it."""
    everyone = candidates(RUN, fleet(), MODEL)
    best = 0.0
    for (codec, factor), fragments in product(product(CODEC_BITS, (1, 2)), (48, 24, 12, 6)):
        if codec == "fp32":
            continue
        need = load_of_round(MODEL, codec, codec, RUN.train.inner)
        for size, quorum_of in product(range(1, 5), (lambda m: 1, lambda m: (m + 1) // 2, lambda m: m)):
            for kept in combinations(everyone, size):
                least = max(candidate.least_every(need, kept[0].step_s) for candidate in kept)
                every = factor * max(RUN.sync.every, least)
                if every > 1000:
                    continue
                sync = with_sync(
                    codec=codec, weights_codec=codec, every=every, fragments=fragments, quorum=quorum_of(size)
                ).sync
                best = max(best, score(run_fleet(kept, sync, MODEL), RUN, MODEL, goal) or 0.0)
    found = search(everyone, RUN, MODEL, frozenset(SEARCHED), goal)
    assert found is not None
    # a setting has to be better by a little to be preferred
    assert score(found, RUN, MODEL, goal) == pytest.approx(best, rel=0.01)


def test_many_islands_are_searched_greedily_within_a_bound_and_not_much_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = candidates(RUN, fleet(), MODEL)
    exact = search(everyone, RUN, MODEL, frozenset(SEARCHED), Goal())
    monkeypatch.delattr(searching._Search, "exact")
    greedy = search(everyone, RUN, MODEL, frozenset(SEARCHED), Goal(), max_work=100)
    assert exact is not None
    assert greedy is not None
    best = score(exact, RUN, MODEL, Goal()) or 0.0
    assert best * 0.95 <= (score(greedy, RUN, MODEL, Goal()) or 0.0) <= best * 1.01


def test_the_fastest_plan_is_found_where_the_search_for_another_goal_finds_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of many islands it may: it looks at so many fleets only."""
    goal = Goal("cost", deadline_s=30 * 86_400.0)
    monkeypatch.setattr(planner, "search", lambda *a: search(*a) if a[4] == Goal() else None)
    assert planner._plan(RUN, fleet(), MODEL, goal, frozenset(SEARCHED)).islands
    with pytest.raises(InfeasibleError, match="no plan reaches"):
        planner._plan(RUN, fleet(), MODEL, replace(goal, deadline_s=3600.0), frozenset(SEARCHED))


def test_a_syncer_that_cannot_keep_up_with_all_takes_the_largest() -> None:
    islands = [replace(template, name=f"{template.name}{n}") for n in range(60) for template in (IOWA, OLD)]
    plan = make_plan(RUN, fleet(*islands), MODEL)
    assert plan.islands
    assert plan.prediction.goodput > 0.6
    taken = {planned.name.rstrip("0123456789") for planned in plan.islands}
    assert taken == {"iowa"}


def test_a_budget_per_hour_is_kept_and_says_who_is_too_expensive() -> None:
    plan = make_plan(RUN, fleet(), MODEL, Goal(budget_per_h=20.0))
    assert plan.money.per_h <= 20.0
    reasons = {left.name: left.reason for left in plan.excluded}
    assert "with it the plan is beyond the limits: 46.11/h" in reasons["iowa"]  # 46 of it the accelerators


def test_too_expensive_is_the_reason_even_where_its_round_would_be_too_short_for_others() -> None:
    """With 40/h for iowa and 30 Mbit/s at home: home's link does not carry the round that iowa would set."""
    dear = replace(IOWA, price_per_h=40.0)
    plan = make_plan(RUN, fleet(dear, HOME), MODEL, Goal(budget_per_h=5.0), origins=FREE)
    (left,) = plan.excluded
    assert left.name == "iowa"
    assert left.reason.startswith("with it the plan is beyond the limits: 4")


def test_the_cheapest_tokens_are_not_the_fastest() -> None:
    dear = replace(SPOT, name="dear", price_per_h=140.0)
    tokens = make_plan(RUN, fleet(IOWA, SPOT, dear), MODEL)
    cost = make_plan(RUN, fleet(IOWA, SPOT, dear), MODEL, Goal("cost"))
    assert len(tokens.islands) == 3
    assert "dear" not in {planned.name for planned in cost.islands}
    assert cost.money.per_billion_tokens < tokens.money.per_billion_tokens


def test_the_cheapest_within_a_deadline_takes_what_it_needs() -> None:
    unhurried = make_plan(RUN, fleet(IOWA, SPOT), MODEL, Goal("cost"))
    hurried = make_plan(RUN, fleet(IOWA, SPOT), MODEL, Goal("cost", deadline_s=2.1 * 86_400.0))
    assert hurried.prediction.days_to_target <= 2.1 < unhurried.prediction.days_to_target


def test_an_objective_of_cost_without_prices_is_refused() -> None:
    with pytest.raises(UsageError, match="needs prices"):
        make_plan(RUN, fleet(OLD, HOME), MODEL, Goal("cost"))


@pytest.mark.parametrize(
    "goal", [Goal(budget_per_h=1.0), Goal(budget_total=50.0), Goal(deadline_s=3600.0), Goal("cost", 1.0)]
)
def test_a_limit_that_nothing_meets_names_one_that_something_does(goal: Goal) -> None:
    inventory = fleet(replace(IOWA), replace(SPOT))
    with pytest.raises(InfeasibleError) as caught:
        make_plan(RUN, inventory, MODEL, goal)
    assert caught.value.hint is not None
    amount = re.search(r"--(budget|deadline) '?([\d.]+)( d|/h|/run)", caught.value.hint)
    assert amount is not None
    value, unit = float(amount[2]), amount[3]
    limits = {" d": "deadline_s", "/h": "budget_per_h", "/run": "budget_total"}
    met = Goal(goal.objective, **{limits[unit]: value * (86_400 if unit == " d" else 1)})
    assert make_plan(RUN, inventory, MODEL, met).islands


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 32), st.floats(1e7, 1e10)), min_size=1, max_size=12), st.integers(24, 500))
def test_whoever_is_carried_has_a_link_for_the_round(shapes: list[tuple[int, float]], every: int) -> None:
    islands = [
        island(f"i{n}", count=count, link=Link(up_bps=bps, down_bps=bps)) for n, (count, bps) in enumerate(shapes)
    ]
    everyone = candidates(RUN, fleet(*islands), MODEL)
    need = load_of_round(MODEL, "bf16", "bf16", RUN.train.inner)
    kept = carried(everyone, every, need)
    for candidate in kept:
        assert candidate.carries(need, every * kept[0].step_s)
    if not kept:
        assert not any(candidate.carries(need, every * candidate.step_s) for candidate in everyone)


def test_the_same_question_has_the_same_answer() -> None:
    inventory = fleet(IOWA, SPOT, replace(OLD, link=FAST), HOME)
    assert make_plan(RUN, inventory, MODEL, origins=FREE) == make_plan(RUN, inventory, MODEL, origins=FREE)


@pytest.mark.parametrize("count", [36, 48, 100])
def test_as_many_islands_are_taken_as_the_exchange_bears(count: int) -> None:
    """Of equal ones, an enumeration by number; each more makes the syncer's part of an exchange longer."""
    islands = [island(f"i{n:02}", batch=65_536) for n in range(count)]
    everyone = candidates(RUN, fleet(*islands), MODEL)
    scores = [score(run_fleet(everyone[:n], RUN.sync, MODEL), RUN, MODEL, Goal()) or 0.0 for n in range(1, count + 1)]
    found = search(everyone, RUN, MODEL, frozenset(), Goal())
    assert found is not None
    assert score(found, RUN, MODEL, Goal()) == pytest.approx(max(scores))
    assert len(found.kept) not in _halvings(count)
