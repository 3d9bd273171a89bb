"""Prediction against reality: ratios by hand, and a plan made again with what was measured."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import LocalMachine
from diloco_cli.errors import UsageError
from diloco_cli.plan.calibrate import MeasuredIsland, MeasuredRun, calibrate
from diloco_cli.plan.planner import make_plan
from tests.unit.plan.fleets import IOWA, MODEL, OLD, RUN, SPOT, fleet, island

PLAN = make_plan(RUN, fleet(IOWA, SPOT, OLD), MODEL)


def measured(*islands: MeasuredIsland, wall_s: float = 1000.0, tokens: int = 500_000_000) -> MeasuredRun:
    return MeasuredRun("worked", wall_s, tokens, 520_000.0, 30_000, islands)


def test_ratios_are_measured_over_predicted() -> None:
    found = calibrate(PLAN, measured(MeasuredIsland("iowa", 400_000.0, 10**10, 2 * 10**10, 1)))
    rows = {row.what: row for row in found.comparison}
    assert rows["merged tokens/s"].measured == 500_000.0
    assert rows["merged tokens/s"].ratio == pytest.approx(500_000 / PLAN.prediction.tokens_per_s)
    assert rows["merged tokens/s, steady"].measured == 520_000.0
    assert rows["goodput, percent"].measured == pytest.approx(100 * 500_000 / PLAN.prediction.tokens_per_s_ideal)
    assert rows["requests/s"].measured == 30.0
    iowa = PLAN.islands[0]
    assert rows["iowa: tokens/s"].ratio == pytest.approx(400_000 / iowa.tokens_per_s)
    round_s, steady_s = PLAN.schedule.round_s, 500_000_000 / 520_000  # as long as the tokens take, steady
    offers, commits = 24 * 700, 24 * (800 + 3 * 350)  # one of each a slot, with three inputs
    up, down = (2.4e9 + offers) / round_s + 349 / 3, (2e9 + commits) / round_s
    assert rows["iowa: bytes/s up"].predicted == pytest.approx(up)
    joining = 2e9 / steady_s  # its process downloaded the whole model, once
    assert rows["iowa: bytes/s down"].predicted == pytest.approx(down + joining)
    assert rows["iowa: bytes/s down"].ratio == pytest.approx(2e10 / steady_s / (down + joining))
    steady = 100 * 520_000 / PLAN.prediction.tokens_per_s_ideal
    assert rows["goodput, percent, steady"].measured == pytest.approx(steady)


def test_what_was_trained_and_not_merged_is_told_apart_from_speed() -> None:
    rates = {"iowa": 400_000.0, "spot": 150_000.0, "old": 20_000.0}
    everyone = [MeasuredIsland(name, rate, 1, 1, 1) for name, rate in rates.items()]
    name = "merged of what was trained, percent"
    whole = {row.what: row for row in calibrate(PLAN, measured(*everyone)).comparison}[name]
    assert whole.measured == pytest.approx(100 * 520_000 / 570_000)
    assert whole.predicted == pytest.approx(100 * PLAN.prediction.goodput)
    part = {row.what: row for row in calibrate(PLAN, measured(everyone[0])).comparison}[name]
    assert part.measured is None and part.ratio is None


def test_the_plan_made_again_has_the_measured_speeds() -> None:
    slow = island("slow", slowdown=2.0)
    plan = make_plan(RUN, fleet(IOWA, slow), MODEL)
    found = calibrate(plan, measured(*(MeasuredIsland(name, 100_000.0, 1, 1, 1) for name in ("iowa", "slow"))))
    assert [i.tokens_per_s for i in found.inventory.islands] == [100_000.0, 200_000.0]  # undisturbed by its throttle
    again = make_plan(RUN, found.inventory, MODEL)
    assert [i.tokens_per_s for i in again.islands] == [100_000.0, 100_000.0]
    assert again.assumptions[0].mark == "measured"


def test_a_crowd_on_the_machine_is_not_counted_twice() -> None:
    cores = [island(name, "cpu", 1, 2048, mfu=None) for name in ("a", "b")]
    inventory = replace(fleet(*cores), local=LocalMachine(1))
    plan = make_plan(RUN, inventory, MODEL)
    alone = make_plan(RUN, fleet(*cores), MODEL).islands[0].tokens_per_s
    assert plan.islands[0].tokens_per_s == pytest.approx(0.8 / 2 * alone)  # 0.2 of a core: syncer, evaluator
    found = calibrate(plan, measured(*(MeasuredIsland(name, 8.0, 1, 1, 1) for name in ("a", "b"))))
    assert [i.tokens_per_s for i in make_plan(RUN, found.inventory, MODEL).islands] == pytest.approx([8.0, 8.0])


def test_failures_that_were_seen_give_the_mtbf() -> None:
    few = calibrate(PLAN, measured(MeasuredIsland("iowa", 1.0, 1, 1, 2)))
    many = calibrate(PLAN, measured(MeasuredIsland("iowa", 1.0, 1, 1, 5)))
    assert few.inventory.islands[0].mtbf_s == IOWA.mtbf_s
    assert many.inventory.islands[0].mtbf_s == 250.0


def test_another_runs_islands_or_no_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="none of the plan's islands; it has elsewhere"):
        calibrate(PLAN, measured(MeasuredIsland("elsewhere", 1.0, 1, 1, 1)))
    with pytest.raises(UsageError, match="merged nothing yet"):
        calibrate(PLAN, measured(MeasuredIsland("iowa", 1.0, 1, 1, 1), tokens=0))


def test_links_are_corrected_as_far_as_bytes_took_the_time() -> None:
    """50 MB in 2 s and a round trip of 5 ms; an emulated link is what it is stated to be."""
    slow = MeasuredIsland("iowa", 1.0, 1, 1, 1, sent_bytes=50e6, upload_s=2.005, adoption_s=1.0)
    link = replace(IOWA.link, rtt_s=0.005)
    plans = [make_plan(RUN, fleet(replace(IOWA, link=each)), MODEL) for each in (link, replace(link, emulate=True))]
    found, emulated = (calibrate(plan, measured(slow)) for plan in plans)
    assert found.inventory.islands[0].link == replace(link, up_bps=pytest.approx(200e6))
    assert emulated.inventory.islands[0].link.up_bps == link.up_bps
    exchange = {row.what: row for row in found.comparison}["iowa: exchange, s"]
    assert (exchange.predicted, exchange.measured) == (plans[0].islands[0].transfer_s, pytest.approx(3.005))
    of_calls = calibrate(plans[0], measured(replace(slow, sent_bytes=1e3, upload_s=0.012)))
    assert of_calls.inventory.islands[0].link == link
    unheard = calibrate(plans[0], measured(MeasuredIsland("iowa", 1.0, 1, 1, 1)))
    assert unheard.inventory.islands[0].link == link
    assert {row.what: row for row in unheard.comparison}["iowa: exchange, s"].measured is None


def test_how_long_failed_processes_were_gone_is_the_restart() -> None:
    seen, unseen = (calibrate(PLAN, measured(MeasuredIsland("iowa", 1.0, 1, 1, 5, down_s=s))) for s in (37.0, None))
    assert seen.inventory.islands[0].restart_s == 37.0
    assert unseen.inventory.islands[0].restart_s == IOWA.restart_s
    once = calibrate(PLAN, measured(MeasuredIsland("iowa", 1.0, 1, 1, 2, down_s=37.0)))
    assert once.inventory.islands[0].restart_s == IOWA.restart_s
