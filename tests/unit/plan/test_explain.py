"""Every printed number can be computed again from what is printed beside it."""

from __future__ import annotations

from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators, Device
from diloco_cli.config.settings import Link
from diloco_cli.errors import InfeasibleError
from diloco_cli.plan.plan import Plan
from diloco_cli.plan.planner import explain, make_plan
from tests.unit.plan.fleets import IOWA, MODEL, OLD, RUN, SPOT, fleet, island, with_sync

ROUNDED = {"%": 0.02, "s": 2e-3}  # differences of numbers printed with six digits
ALLOWED = {"__builtins__": {}, "min": min, "max": max, "round": round, "ceil": ceil, "inf": inf}


def check(plan: Plan) -> int:
    """Evaluates all arithmetic of a plan; returns how much of it there was."""
    count = 0
    for item in explain(plan):
        if item.numbers:
            rounded = ROUNDED.get(item.unit, 1e-9)
            if item.unit in ("steps", "slots") and on_the_edge(item.numbers):
                rounded = 1.0
            assert eval(item.numbers, ALLOWED) == pytest.approx(item.value, rel=2e-4, abs=rounded), item
            count += 1
    return count


def on_the_edge(numbers: str) -> bool:
    """Whether a seventh digit decides how a number is rounded."""
    exact = eval(numbers, {**ALLOWED, "round": float, "ceil": float})
    return bool(abs(2 * exact - round(2 * exact)) < 1e-3)


def test_the_worked_example_computes() -> None:
    plan = make_plan(RUN, fleet(), MODEL)
    assert check(plan) > 70
    texts = {(item.of, item.name): item for item in explain(plan)}
    assert texts["model", "FLOPs per token"].numbers == "6 * 1e9 + 12 * 16 * 2048 * 2048"
    assert texts["iowa", "tokens/s undisturbed"].numbers == "8 * 989 * 1e12 * 0.4 / 6.80531e9 / 1"
    assert texts["iowa", "uplink needed"].value == pytest.approx(141.9, abs=0.05)


def test_every_way_to_get_a_number_computes() -> None:
    """Measured speeds, cores, throttles, idle accelerators, FSDP, a quorum of all, unknown links, other mixing."""
    core = island("core", "cpu", 4, 65_536, slowdown=2.0, link=Link(), mfu=None)
    odd = island("odd", count=7, batch=20 * 2048)
    known = replace(SPOT, name="known", tokens_per_s=123_456.0)
    for run in (
        RUN,
        with_sync(mixing="rebase", quorum=2, overlap=9),
        with_sync(fragments=40),
        with_sync(codec="int8", weights_codec="fp32", fragments=1, every=800),
    ):
        assert check(make_plan(run, fleet(IOWA, known, OLD, odd, core), MODEL)) > 40
    assert check(make_plan(with_sync(quorum=2), fleet(IOWA, SPOT), MODEL)) > 40


@settings(max_examples=12, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(("H100-SXM", "A100-40GB", "TPU-v5p")), st.integers(1, 64), st.floats(3e8, 1e10)),
        min_size=1,
        max_size=4,
    ),
    every=st.integers(50, 400),
    mtbf=st.floats(600.0, 1e6),
)
def test_any_plan_computes(shapes: list[tuple[str, int, float]], every: int, mtbf: float) -> None:
    islands = [
        island(f"i{n}", device, count, 262_144, Link(bps, bps, 0.02), mtbf_s=mtbf, restart_s=60.0, price_per_h=3.0)
        for n, (device, count, bps) in enumerate(shapes)
    ]
    try:
        plan = make_plan(with_sync(every=every), fleet(*islands), MODEL)
    except InfeasibleError:
        return
    check(plan)


def test_a_device_of_ones_own_is_explained_too() -> None:
    mine = replace(IOWA, accelerators=Accelerators("MyChip", 8))
    inventory = replace(fleet(mine), devices={"MyChip": Device("MyChip", memory_gb=48.0, bf16_tflops=300.0)})
    assert check(make_plan(RUN, inventory, MODEL)) > 20
