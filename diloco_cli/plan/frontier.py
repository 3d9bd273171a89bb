"""Time against money against loss: plans of which none is better in all three."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import le

from diloco_cli.config.codec import replace
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.plan.flow import DAY_S
from diloco_cli.plan.plan import Goal, Objective, Plan

STEPS = 6  # deadlines between the fastest plan and the slowest that money or loss asks for
BETTER = 0.005  # a share: less than that is no difference
OTHERS: tuple[Objective, ...] = ("cost", "loss")


def frontier(planned: Callable[[Goal], Plan], limits: Goal) -> list[Plan]:
    """The fastest first. `planned`: the plan for a goal; `limits`: those of all of them."""
    fastest = planned(replace(limits, objective="tokens"))
    found = [fastest, *_best(planned, limits)]
    first, last = (pick(plan.prediction.days_to_target for plan in found) for pick in (min, max))
    for step in range(1, STEPS):
        deadline_s = DAY_S * _rounded_up(first * (last / first) ** (step / STEPS))
        found += _best(planned, replace(limits, deadline_s=min(deadline_s, limits.deadline_s or deadline_s)))
    kept: list[Plan] = []
    for plan in sorted(found, key=_worth):
        bounds = [its * (1 + BETTER) for its in _worth(plan)]
        if not any(all(map(le, _worth(other), bounds)) for other in kept):
            kept.append(plan)
    return kept


def _rounded_up(days: float) -> float:
    """To three digits, as people read it: what is planned is what is printed."""
    digits = 2 - math.floor(math.log10(days))
    return math.ceil(days * 10.0**digits) / 10.0**digits


def _best(planned: Callable[[Goal], Plan], limits: Goal) -> Iterator[Plan]:
    """By money and by loss, as far as these are known."""
    for objective in OTHERS:
        try:
            yield planned(replace(limits, objective=objective))
        except (InfeasibleError, UsageError):
            continue


def _worth(plan: Plan) -> tuple[float, float, float]:
    """Less is better."""
    return plan.prediction.days_to_target, plan.money.total, plan.prediction.loss_percent or 0.0
