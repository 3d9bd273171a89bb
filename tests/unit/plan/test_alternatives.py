"""What else could be, and what would change the answer: made by planning again."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import Link
from diloco_cli.plan.planner import make_plan
from tests.unit.plan.fleets import HOME, IOWA, MODEL, OLD, RUN, SPOT, fleet, with_sync


def test_a_link_that_would_let_an_island_in_is_named_with_what_it_brings() -> None:
    plan = make_plan(RUN, fleet(), MODEL)
    found = {item.change: item for item in plan.sensitivity}
    home = found["home with 180 Mbps up"]
    with_it = make_plan(RUN, fleet(IOWA, SPOT, OLD, replace(HOME, link=Link(180e6, 300e6, 0.03))), MODEL)
    assert home.tokens_per_s == pytest.approx(with_it.prediction.tokens_per_s)
    assert home.gain_percent == pytest.approx(100 * (home.tokens_per_s / plan.prediction.tokens_per_s - 1))
    assert 1 < home.gain_percent < 3


def test_changes_are_ordered_by_how_much_they_matter() -> None:
    gains = [abs(item.gain_percent) for item in make_plan(RUN, fleet(), MODEL).sensitivity]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) >= 5


def test_alternatives_are_the_same_planner_with_one_setting_changed() -> None:
    plan = make_plan(RUN, fleet(), MODEL)
    found = {alternative.name: alternative for alternative in plan.alternatives}
    other = make_plan(with_sync(codec="int8", weights_codec="int8"), fleet(), MODEL)
    assert found["sync.codec=int8"].tokens_per_s == pytest.approx(other.prediction.tokens_per_s)
    assert found["sync.codec=int8"].total == pytest.approx(other.money.total)
    assert "gives up" in found["sync.mixing=rebase"].reason
    assert found["sync.mixing=rebase"].tokens_per_s > plan.prediction.tokens_per_s
    assert found["synchronous data-parallel"].tokens_per_s == plan.prediction.synchronous_tokens_per_s


def test_an_alternative_that_is_infeasible_says_why() -> None:
    alone = make_plan(
        with_sync(codec="int8", weights_codec="int8"), fleet(replace(IOWA, link=Link(1.1e8, 1.1e8))), MODEL
    )
    bf16 = next(item for item in alone.alternatives if item.name == "sync.codec=bf16")
    assert bf16.tokens_per_s == 0
    assert "needs 142 Mbps" in bf16.reason
