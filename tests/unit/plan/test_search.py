"""The search: what is pinned stays, what is chosen keeps every limit, and more to choose from is never worse."""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.models import facts_from_numbers
from diloco_cli.config.settings import Link, RunSettings
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.plan import planner
from diloco_cli.plan import search as searching
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.flow import Fleet, run_fleet
from diloco_cli.plan.link import load_of_round
from diloco_cli.plan.plan import Goal
from diloco_cli.plan.planner import make_plan
from diloco_cli.plan.search import FRAGMENTS, HEADROOM, LANES, LEAST_ROUNDS, SEARCHED, score, search
from tests.studies.plans import SAME, broken, case, variations
from tests.unit.plan.fleets import FAST, HOME, IOWA, MODEL, OLD, RUN, SPOT, fleet, island, with_sync

FREE: dict[str, str] = {}  # origins of a run file that pins nothing
NONE: frozenset[str] = frozenset()  # nothing is searched but islands


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


def test_an_island_with_short_steps_does_not_ruin_the_round_of_the_others() -> None:
    quick = island("quick", "L40S", 1, 2048, replace(FAST, up_bps=3e9))
    narrow = replace(IOWA, link=Link(up_bps=300e6, down_bps=300e6))
    plan = make_plan(with_sync(every=100), fleet(narrow, quick), MODEL)
    assert [planned.name for planned in plan.islands] == ["iowa"]
    (left,) = plan.excluded
    assert "would set a round of" in left.reason
    assert "too short for the link of iowa" in left.reason
    batch = int(left.suggestions[0].removeprefix("batch_tokens: "))
    again = make_plan(with_sync(every=100), fleet(narrow, replace(quick, batch_tokens=batch)), MODEL)
    assert not again.excluded


def kept_limits(found: Fleet, run: RunSettings) -> bool:
    """The syncer, lanes, a hundred rounds."""
    load, round_s = load_of_round(MODEL, found.sync, run.train.inner), found.schedule.round_s
    lanes = [load.busy_s(c.link) / max(round_s, c.step_s) for c in found.kept]
    rounds = run.train.tokens / (found.tokens_per_s * found.served_round_s)
    return max(lanes) <= LANES and found.syncer_load <= HEADROOM and rounds >= LEAST_ROUNDS


@cache
def dense_scan() -> list[Fleet]:
    """Everything that a grid of 9 H, 10 P, 3 codecs, quorums and subsets holds within the limits."""
    held = []
    everyone = candidates(RUN, fleet(), MODEL)
    for (codec, step), fragments in product(product(("bf16", "int8", "int4"), range(9)), FRAGMENTS):
        for size in range(1, 5):
            for kept, quorum in product(combinations(everyone, size), {1, (size + 1) // 2, size}):
                every = round(1000 ** (step / 8))
                changed = {"codec": codec, "weights_codec": codec, "fragments": fragments, "quorum": quorum}
                found = run_fleet(kept, with_sync(every=every, **changed).sync, MODEL)
                if kept_limits(found, RUN):
                    held.append(found)
    return held


@pytest.mark.parametrize(
    "goal", [Goal(), Goal("cost"), Goal(budget_per_h=40.0), Goal("cost", deadline_s=20 * 86_400.0)]
)
def test_few_islands_are_searched_as_well_as_a_dense_scan_does(goal: Goal) -> None:
    best = max(score(found, RUN, MODEL, goal) or 0.0 for found in dense_scan())
    chosen = search(RUN, fleet(), MODEL, frozenset(SEARCHED), goal)
    assert chosen is not None and kept_limits(chosen, RUN)
    assert (score(chosen, RUN, MODEL, goal) or 0.0) >= 0.99 * best > 0


def test_many_islands_are_searched_within_a_bound_and_not_much_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    islands = [replace(each, name=f"{each.name}{n}") for n in range(3) for each in (IOWA, SPOT, OLD, HOME)]
    found = [search(RUN, fleet(*islands), MODEL, frozenset(SEARCHED), Goal())]
    monkeypatch.setattr(searching, "MANY_ISLANDS", 8)
    found.append(search(RUN, fleet(*islands), MODEL, frozenset(SEARCHED), Goal(), max_work=20_000))
    few, many = (score(each, RUN, MODEL, Goal()) or 0.0 for each in found if each)
    assert few * 0.95 <= many <= few * 1.01


def test_of_many_unlike_islands_the_scan_tries_every_pace_before_it_is_cut_short() -> None:
    """144 islands of five kinds; a fourth of the usual work would go for all settings of the longest rounds."""
    asked = case(11, most_islands=200)
    found = [
        search(asked.run, asked.inventory, asked.model, frozenset(SEARCHED), Goal(), max_work=work)
        for work in (15_000, 60_000)
    ]
    little, much = (score(each, asked.run, asked.model, Goal()) or 0.0 for each in found if each)
    assert little >= 0.95 * much


def test_of_many_islands_more_take_part_where_only_more_fragments_fit_their_memory() -> None:
    """No rank has room for 24 fragments on their way, so that a ranking by these would name nobody."""
    model = facts_from_numbers(70_000_000_000, 80, 8192, 2048)
    islands = [island(f"i{n:03}", "H200", 8, 2048 * 3200, nodes=100, infra="slurm/p") for n in range(200)]
    run = replace(with_sync(every=24), train=replace(RUN.train, tokens=15 * 10**12))
    assert not any(each.can_train for each in candidates(run, fleet(*islands), model))
    found = search(run, fleet(*islands), model, frozenset(SEARCHED), Goal(), max_work=20_000)
    assert found is not None and HEADROOM * 0.9 <= found.syncer_load <= HEADROOM and found.tokens_per_s > 24e6


def test_of_many_islands_those_are_left_out_that_set_too_fast_a_pace() -> None:
    """With H given, slots of four quick islands would be a fourth of what the syncer of forty others can hold."""
    quick = [island(f"q{n}", batch=16_384) for n in range(4)]
    others = [island(f"i{n:02}", batch=131_072) for n in range(40)]
    plan = make_plan(RUN, fleet(*quick, *others), MODEL)
    best = make_plan(RUN, fleet(*others), MODEL)
    assert plan.prediction.tokens_per_s >= 0.99 * best.prediction.tokens_per_s


def test_of_many_islands_the_many_quick_ones_do_not_set_the_pace_of_a_free_search() -> None:
    """A syncer carries few of the large ones in the longest round that a quick one makes."""
    quick = [island(f"q{n:03}", "L40S", batch=8_192) for n in range(120)]
    large = [island(f"i{n:02}", batch=1_048_576, nodes=8, infra="slurm/p") for n in range(40)]
    both, alone = (search(RUN, fleet(*each), MODEL, frozenset(SEARCHED), Goal()) for each in ([*quick, *large], large))
    assert both and alone and both.effective_tokens_per_s >= 0.98 * alone.effective_tokens_per_s


def test_nothing_overloads_its_syncer_while_something_else_need_not() -> None:
    """A call to its bucket takes 270 ms, and the fastest steps are short."""
    inventory = fleet(*(island(f"i{n}", batch=16_384 * (1 + n)) for n in range(5)))
    far = replace(inventory, store=replace(inventory.store, link=Link(None, None, rtt_s=0.27)))
    plan = make_plan(with_sync(every=24), far, MODEL, origins=FREE)
    assert plan.syncer.busy_percent <= 100 * HEADROOM and len(plan.islands) > 1


def test_a_run_has_a_hundred_rounds_unless_told() -> None:
    """Or a few less, where they bring more than their share of speed."""
    short = replace(RUN, train=replace(RUN.train, tokens=2 * 10**9))
    for every, rounds in ((None, 95.0), (200, 0.0)):
        origins = {"sync.every": "run.yaml:1"} if every else FREE
        plan = make_plan(with_sync(short, every=every or 24), fleet(), MODEL, origins=origins)
        found = 2e9 / (plan.prediction.tokens_per_s * plan.schedule.round_s)
        assert found >= rounds and (rounds or found < 95) and plan.run.sync.every == (every or plan.run.sync.every)


def test_two_machines_at_home_train_together_though_their_links_leave_few_rounds() -> None:
    """2B tokens of GPT-2 on two cards behind 40 Mbit/s: 40 rounds together, or 90 of one alone at half the speed."""
    model = facts_from_numbers(124_000_000, 12, 768, 1024, 50_257)
    link = Link(up_bps=40e6, down_bps=40e6)
    two = fleet(*(island(name, batch=32_768, tokens_per_s=95_000.0, link=link) for name in ("anna", "bert")))
    short = replace(RUN, train=replace(RUN.train, tokens=2 * 10**9))
    plan = make_plan(short, replace(two, store=replace(two.store, link=link)), model, origins=FREE)
    assert len(plan.islands) == 2 and plan.prediction.tokens_per_s > 1.8 * 95_000


def test_memory_is_that_of_the_fragments_and_of_all_that_is_on_its_way() -> None:
    """No rank has room for three of 24 fragments of 70B parameters, nor for all that is on its way of more."""
    model = facts_from_numbers(70_000_000_000, 80, 8192, 2048)
    islands = [island(f"i{n}", "A100-80GB-SXM", 8, 2048 * 192, nodes=24, infra="slurm/p") for n in range(2)]
    run = replace(with_sync(fragments=24), train=replace(RUN.train, checkpointing=True))
    plan = make_plan(run, fleet(*islands), model, origins=FREE)
    assert plan.islands and all(each.fits for each in plan.islands) and plan.schedule.fragments > 24
    with pytest.raises(InfeasibleError) as caught:
        make_plan(run, fleet(*islands), model)
    named = re.search(r"--set sync.fragments=(\d+)", str(caught.value.hint))
    assert named and make_plan(with_sync(run, fragments=int(named[1])), fleet(*islands), model).islands


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
    assert "with it the plan is beyond the limits: 46.12/h" in reasons["iowa"]  # 46 of it the accelerators


def test_the_cheapest_tokens_are_not_the_fastest() -> None:
    dear = replace(SPOT, name="dear", price_per_h=140.0)
    tokens = make_plan(RUN, fleet(IOWA, SPOT, dear), MODEL)
    cost = make_plan(RUN, fleet(IOWA, SPOT, dear), MODEL, Goal("cost"))
    assert len(tokens.islands) == 3
    assert "dear" not in {planned.name for planned in cost.islands}
    assert cost.money.per_billion_tokens < tokens.money.per_billion_tokens


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


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 32), st.floats(1e7, 1e10)), min_size=1, max_size=12), st.integers(24, 500))
def test_whoever_takes_part_has_a_link_for_the_round(shapes: list[tuple[int, float]], every: int) -> None:
    islands = [island(f"i{n}", count=count, link=Link(bps, bps)) for n, (count, bps) in enumerate(shapes)]
    run = with_sync(every=every)
    need, found = load_of_round(MODEL, run.sync, run.train.inner), search(run, fleet(*islands), MODEL, NONE, Goal())
    everyone = candidates(run, fleet(*islands), MODEL)
    if found is None:
        assert not any(candidate.carries(need, every * candidate.step_s) for candidate in everyone)
    else:
        assert all(candidate.carries(need, found.schedule.round_s) for candidate in found.kept)


def test_the_same_question_has_the_same_answer() -> None:
    inventory = fleet(IOWA, SPOT, replace(OLD, link=FAST), HOME)
    assert make_plan(RUN, inventory, MODEL, origins=FREE) == make_plan(RUN, inventory, MODEL, origins=FREE)


@pytest.mark.parametrize("count", [36, 48, 100])
def test_as_many_islands_are_taken_as_the_exchange_bears(count: int) -> None:
    """Of equal ones, an enumeration by number; each more makes the syncer's part of an exchange longer."""
    islands = [island(f"i{n:02}", batch=65_536) for n in range(count)]
    everyone = candidates(RUN, fleet(*islands), MODEL)
    scores = [score(run_fleet(everyone[:n], RUN.sync, MODEL), RUN, MODEL, Goal()) or 0.0 for n in range(1, count + 1)]
    found = search(RUN, fleet(*islands), MODEL, NONE, Goal())
    assert found is not None
    assert score(found, RUN, MODEL, Goal()) == pytest.approx(max(scores))


@pytest.mark.parametrize("seed", [2, 5, 7, *(pytest.param(n, marks=pytest.mark.long) for n in range(300))])
def test_more_to_choose_from_is_never_worse(seed: int) -> None:
    """One more island, a faster link, half the round trip, fewer failures, a larger budget, a later deadline, a cheaper
    price, no egress; and the plan for the least money is the cheapest."""
    assert list(broken(seed)) == []


def test_without_egress_the_cheapest_plan_is_never_dearer() -> None:
    """Here it was, where islands alone were tuned with the run's own number of fragments, which broke a limit."""
    base = case(118)
    found = {name: pair for name, *pair in variations(base, replace(base, goal=Goal("cost")), 118)}
    without, with_it = (each.found.best_worth for each in found["no egress"])
    assert with_it >= SAME * without > 0


@pytest.mark.parametrize(
    ("nodes", "mbps", "tokens", "slowest"), [(1, 50, 2 * 10**10, 900_000), (4, 100, 4 * 10**10, 2_200_000)]
)
def test_a_large_island_behind_a_slow_link_takes_part(nodes: int, mbps: int, tokens: int, slowest: int) -> None:
    """It did not where a hundred rounds were a limit: half of the speed was given for a few of them."""
    model = facts_from_numbers(1_000_000_000, 16, 2048, 2048)
    run = replace(RUN, train=replace(RUN.train, tokens=tokens, batch_tokens=524_288))
    near = replace(island("near", "H100-SXM", 8, 524_288, Link(up_bps=5e9, down_bps=5e9)), nodes=nodes, mfu=0.4)
    far = replace(near, name="far", nodes=1, link=Link(up_bps=mbps * 1e6, down_bps=mbps * 1e6))
    plan = make_plan(run, fleet(near, far), model, origins=FREE)
    assert {planned.name for planned in plan.islands} == {"near", "far"}
    assert plan.prediction.tokens_per_s > slowest


@pytest.mark.parametrize("seed", [1, 2, 11, *(pytest.param(n, marks=pytest.mark.long) for n in range(60))])
def test_what_is_searched_keeps_its_syncers_pace(seed: int) -> None:
    plan = case(seed).plan()
    assert plan is None or plan.syncer.busy_percent <= 100
