"""Plans that work on paper alone are warned of, with what to change."""

from __future__ import annotations

import re

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import Link, OuterSettings
from diloco_cli.plan.planner import make_plan
from diloco_cli.plan.remarks import (
    alternatives,
    horizon_warnings,
    round_warnings,
    rounded_down,
    snapshot_warnings,
    step_warnings,
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
