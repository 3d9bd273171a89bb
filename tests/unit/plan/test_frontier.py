"""Plans of which none is better in time, money and loss."""

from __future__ import annotations

import re
from functools import cache

import pytest

from diloco_cli.cli.plan_choices import goal_words
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings, Inventory, RunSettings
from diloco_cli.plan import quality
from diloco_cli.plan.frontier import BETTER, frontier
from diloco_cli.plan.plan import Goal, Plan
from diloco_cli.plan.planner import outline
from diloco_cli.plan.quality import Measured
from diloco_cli.quantities import parse_duration
from tests.unit.plan.fleets import HOME, IOWA, MODEL, OLD, RUN, SPOT, fleet

TRIALS = tuple(Measured(islands, 200, "adamw", 100_000, 20.0, 1.0, None, 1, 24, "rebase") for islands in (2, 4))
PINNED = dict.fromkeys(("sync.codec", "sync.weights_codec", "sync.fragments"), "run.yaml:1")  # for a quick search
PRICED = fleet(IOWA, replace(SPOT, egress_per_gb=0.02), replace(OLD, price_per_h=2.0))


@pytest.fixture(autouse=True)
def _two_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontier depends on what was measured, which others measure anew."""
    monkeypatch.setattr(quality, "measured", lambda: TRIALS)


@cache
def planned(goal: Goal) -> Plan:
    """Several tests ask for the same."""
    return outline(RUN, PRICED, MODEL, goal, PINNED)


def found(inventory: Inventory = PRICED, run: RunSettings = RUN) -> list[Plan]:
    return frontier(lambda goal: outline(run, inventory, MODEL, goal, PINNED), Goal())


def worth(plan: Plan) -> tuple[float, float, float]:
    return plan.prediction.days_to_target, plan.money.total, plan.prediction.loss_percent or 0.0


def test_none_is_better_in_all_and_the_ends_are_the_best_of_each() -> None:
    plans = frontier(planned, Goal())
    assert len(plans) >= 3
    for index, plan in enumerate(plans):
        for other in plans[:index] + plans[index + 1 :]:
            assert any(mine < its for mine, its in zip(worth(plan), worth(other), strict=True))
    for which, objective in enumerate(("tokens", "cost", "loss")):
        best = planned(Goal(objective))
        assert min(worth(plan)[which] for plan in plans) <= worth(best)[which] * (1 + BETTER)
    days = [plan.prediction.days_to_target for plan in plans]
    assert days == sorted(days)


def test_all_of_them_are_within_the_limits_and_are_had_by_their_goals() -> None:
    whole = frontier(planned, Goal())
    deadline_s = 86_400 * (whole[0].prediction.days_to_target + whole[-1].prediction.days_to_target) / 2
    plans = frontier(planned, Goal(budget_per_h=1000.0, deadline_s=deadline_s))
    assert plans and all(86_400 * plan.prediction.days_to_target <= deadline_s for plan in plans)
    for plan in plans:
        printed = re.fullmatch(r"--objective (\w+) --budget 1000/h --deadline '([\d.]+) d'", goal_words(plan.goal))
        assert printed
        again = Goal(plan.goal.objective, 1000.0, None, parse_duration(f"{printed[2]} d"))
        assert worth(planned(again)) == pytest.approx(worth(plan))


def test_a_deadline_is_planned_as_it_is_printed() -> None:
    asked: list[Goal] = []

    def noted(goal: Goal) -> Plan:
        asked.append(goal)
        return planned(goal)

    frontier(noted, Goal())
    days = [goal.deadline_s / 86_400 for goal in asked if goal.deadline_s]
    assert len(days) >= 5 and days == pytest.approx([float(f"{each:.3g}") for each in days], rel=1e-12)
    assert goal_words(Goal("cost", budget_total=20_000.0, deadline_s=1230 * 86_400)).endswith(
        "--budget 20000/run --deadline '1230 d'"
    )


def test_what_is_not_known_is_left_out() -> None:
    free = [plan.goal.objective for plan in found(fleet(replace(IOWA, price_per_h=0.0), HOME))]
    assert free and "cost" not in free
    run = replace(RUN, train=replace(RUN.train, inner=InnerSettings("sgd")))
    plans = found(run=run)
    assert plans and "loss" not in {plan.goal.objective for plan in plans}
    assert all(plan.prediction.loss_percent is None or len(plan.islands) == 1 for plan in plans)
