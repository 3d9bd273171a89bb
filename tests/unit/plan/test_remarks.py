"""Plans that work on paper alone are warned of, with what to change."""

from __future__ import annotations

import re

import pytest

from diloco_cli.cli.plan_choices import frontier_svg, frontier_text
from diloco_cli.cli.plan_view import answer
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import Inventory, IslandSettings, Link, OuterSettings, RegionSettings, StoreSettings
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.flow import run_fleet
from diloco_cli.plan.planner import make_plan, syncer_needs
from diloco_cli.plan.remarks import (
    CROWDED,
    alternatives,
    horizon_warnings,
    round_warnings,
    rounded_down,
    snapshot_warnings,
    step_warnings,
    syncer_warnings,
    without_egress_price,
)
from tests.unit.plan.fleets import IOWA, MODEL, RUN, fleet, with_sync


def test_years_are_warned_of_with_the_tokens_of_a_week() -> None:
    assert horizon_warnings(20_000_000_000, 364.0) == []
    (said,) = horizon_warnings(20_000_000_000, 1213.0)
    assert "20B tokens take 3.3 years" in said and "--set train.tokens=100M takes a week" in said


@pytest.mark.parametrize(
    ("step_s", "batch_tokens", "says"),
    [
        (2760.0, 524_288, "one step takes 46 min: batch_tokens: 1024 makes it 5.39 s"),
        (61.0, 131_072, "one step takes 61 s: batch_tokens: 20480 makes it 9.53 s"),
        (300.0, 4096, "one step takes 5 min, and 75 s with a single sequence: a smaller model, or a faster device"),
    ],
)
def test_a_step_of_minutes_is_warned_of_with_a_batch_that_suits(step_s: float, batch_tokens: int, says: str) -> None:
    assert step_warnings("home", step_s, batch_tokens, 1024) == [f"home: {says}"]
    assert step_warnings("home", 60.0, batch_tokens, 1024) == []


def test_a_run_whose_log_outgrows_its_snapshots_is_warned_of() -> None:
    assert snapshot_warnings(1750, 40) == []
    (said,) = snapshot_warnings(2048, 40)
    assert "2048 islands with 40 fragments" in said and said.endswith("--set sync.fragments=34")


def test_numbers_are_rounded_down_to_one_digit() -> None:
    assert [rounded_down(value) for value in (48_300_000, 9.9, 0.2, 1000)] == [40_000_000, 9, 1, 1000]


def test_alternatives_are_the_same_planner_with_one_setting_changed() -> None:
    plan = make_plan(RUN, fleet(), MODEL)
    found = {alternative.name: alternative for alternative in plan.alternatives}
    other = make_plan(with_sync(codec="int8", weights_codec="int8"), fleet(), MODEL)
    assert found["sync.codec=int8"].tokens_per_s == pytest.approx(other.prediction.tokens_per_s)
    assert found["sync.codec=int8"].total == pytest.approx(other.money.total)
    assert "it keeps what is learned" in found["sync.mixing=rebase"].reason
    assert found["sync.mixing=rebase"].tokens_per_s > plan.prediction.tokens_per_s
    assert found["synchronous data-parallel"].tokens_per_s == plan.prediction.synchronous_tokens_per_s


def test_an_alternative_that_is_infeasible_says_why() -> None:
    alone = make_plan(
        with_sync(codec="int8", weights_codec="int8"), fleet(replace(IOWA, link=Link(1.1e8, 1.1e8))), MODEL
    )
    bf16 = next(item for item in alone.alternatives if item.name == "sync.codec=bf16")
    assert bf16.tokens_per_s == 0
    assert "needs 142 Mbps" in bf16.reason


@pytest.mark.parametrize(("longer", "is_advised"), [(1.0, True), (2.0, True), (20.0, False)])
def test_no_change_is_advised_after_which_few_rounds_are_left(longer: float, is_advised: bool) -> None:
    plan = make_plan(RUN, fleet(), MODEL)
    rounds = RUN.train.tokens / (plan.prediction.tokens_per_s * plan.schedule.round_s)
    plan = replace(plan, schedule=replace(plan.schedule, round_s=plan.schedule.round_s * rounds / 100))  # a hundred
    again = replace(plan, schedule=replace(plan.schedule, round_s=longer * plan.schedule.round_s))
    found = alternatives(plan, lambda run: again)
    advised = {item.reason for item in found if item.tokens_per_s == again.prediction.tokens_per_s}
    refused = {item.reason for item in found if item.tokens_per_s == 0}
    assert (bool(advised), refused) == (is_advised, set() if is_advised else {"the run would have 5 rounds, not 100"})


@pytest.mark.parametrize(
    ("rounds", "momentum", "fitting"),
    [(20, 0.9, "0.5"), (60, 0.7, "0.5"), (60, 0.5, ""), (80, 0.9, ""), (5, "auto", "")],
)
def test_an_outer_momentum_that_a_runs_rounds_do_not_reach_is_warned_of(
    rounds: float, momentum: float | str, fitting: str
) -> None:
    found = round_warnings(OuterSettings(momentum=momentum), "adamw", rounds)  # type: ignore[arg-type]
    assert [re.findall(r"--set outer\.momentum=([0-9.]+),", line) for line in found] == ([[fitting]] if fitting else [])


RENTED, OWN = replace(IOWA, name="rented", region="far"), replace(IOWA, name="own", region="far", price_per_h=0.0)
BUCKET = StoreSettings("gs://bucket", region="here")


@pytest.mark.parametrize(
    ("store", "island", "regions", "uploads", "downloads"),
    [
        (BUCKET, RENTED, {}, True, True),
        (BUCKET, RENTED, {"far": 0.12}, False, True),
        (BUCKET, RENTED, {"here": 0.0}, True, False),
        (BUCKET, RENTED, {"here": 0.12, "far": 0.0}, False, False),
        (BUCKET, replace(RENTED, egress_per_gb=0.1), {"here": 0.1}, False, False),
        (BUCKET, OWN, {}, False, True),
        (BUCKET, replace(RENTED, region="here"), {}, False, False),
        (StoreSettings("/a/folder", region="here"), RENTED, {}, True, False),
        (StoreSettings("gs://bucket"), RENTED, {"far": 0.12}, False, True),
    ],
)
def test_what_leaves_a_region_without_a_price_is_known(
    store: StoreSettings, island: IslandSettings, regions: dict[str, float], uploads: bool, downloads: bool
) -> None:
    priced = {name: RegionSettings(egress_per_gb=price) for name, price in regions.items()}
    found = without_egress_price([island], Inventory(store, (island,), regions=priced))
    assert found == ([island] * uploads, [island] * downloads)


def test_a_price_without_egress_says_so_and_what_would_give_it() -> None:
    priced = Inventory(BUCKET, (IOWA, RENTED), regions={name: RegionSettings(None, 0.1) for name in ("here", "far")})
    whole, lacking = (make_plan(RUN, replace(priced, regions=r), MODEL) for r in (priced.regions, {}))
    assert "without egress" not in answer(whole)[0] and not answer(whole)[1].startswith("egress")
    first, *more = answer(lacking)
    assert " in all without egress (" in first
    assert frontier_text([lacking]).endswith("\nmoney is without egress") and "egress" not in frontier_text([whole])
    assert ">money in all without egress<" in frontier_svg([whole, lacking])
    told = " ".join(" ".join(more[:2]).split())
    assert "in the inventory regions.far.egress, regions.here.egress" in told
    gigabytes = 1000 * float(re.findall(r"no price of (\S+) TB", told)[0])
    assert lacking.money.total + 0.1 * gigabytes == pytest.approx(whole.money.total, rel=0.01)


def test_what_is_not_known_of_links_is_named_by_its_part() -> None:
    up = replace(IOWA, name="up", link=Link(up_bps=2e9))
    made = make_plan(RUN, fleet(IOWA, up, replace(IOWA, name="rest", link=Link(2e9, 2e9))), MODEL)
    assert "; links: guessed down and rtt of up; rtt of rest" in " ".join(" ".join(answer(made)).split())
    assert any(item.text == "up: no downlink given, taken as fast enough" for item in made.assumptions)


@pytest.mark.parametrize(("times", "advice"), [(1.006, ""), (1.1, "--set sync.every=550")])
def test_a_round_that_is_hardly_longer_is_no_advice(times: float, advice: str) -> None:
    run = with_sync(every=500)
    kept = run_fleet(candidates(run, fleet(IOWA), MODEL), run.sync, MODEL)
    needs = syncer_needs(kept, run.outer.name, MODEL)
    (said,) = syncer_warnings(replace(needs, busy_percent=CROWDED * times), kept)
    assert re.findall(r"--set sync\.every=\d+", said) == [advice] * bool(advice)
