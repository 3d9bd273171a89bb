"""The planner against a worked example, against its own laws (more hardware never predicts worse), and at its edges."""

from __future__ import annotations

from math import ceil, inf

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators, find_device
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import (
    IslandSettings,
    Link,
    ModelSettings,
    OuterSettings,
    TrainSettings,
)
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.paths import templates_directory
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.flow import run_fleet
from diloco_cli.plan.memory import model_facts
from diloco_cli.plan.plan import Plan
from diloco_cli.plan.planner import explain, make_plan
from diloco_cli.quantities import format_count
from tests.unit.plan.fleets import HOME, IOWA, MODEL, OLD, RUN, SLOW_UP, SPOT, fleet, island, with_sync


def plan(inventory, run=RUN):
    return make_plan(run, inventory, model_facts(run.model))


def test_the_ways_out_that_change_settings_do_let_the_island_in():
    for way in plan(fleet()).excluded[0].suggestions[:3]:
        words = way.split(" (")[0].split()
        changes = dict(word.rpartition(".")[2].split("=") for word in words if "=" in word)
        sync = replace(RUN.sync, every=int(changes["every"]), codec=changes.get("codec", "bf16"))
        sync = replace(sync, weights_codec=changes.get("weights_codec", "bf16"))
        run = replace(RUN, sync=sync)
        made = plan(fleet(), run)
        assert not made.excluded
        assert all(island.sent_mbps <= island.up_mbps_available for island in made.islands)
        shorter = replace(run, sync=replace(sync, every=sync.every - 1))
        assert plan(fleet(), shorter).excluded


@pytest.mark.parametrize(
    ("links", "says"),
    [
        ((None, None), "no link is given: taken as fast enough"),
        ((None, 1e9), "every link that is given carries its round"),
        ((1e9, 1e9), "every link carries its round"),
    ],
)
def test_the_headline_speaks_of_links_that_are_given(links: tuple[float | None, ...], says: str) -> None:
    islands = [island(name, link=Link(up_bps=bps, down_bps=bps)) for name, bps in zip("ab", links, strict=True)]
    made = plan(fleet(*islands))
    assert made.verdict == "feasible" and made.why.endswith(says)


def test_a_way_out_is_no_round_longer_than_any_published() -> None:
    slow = replace(HOME, link=Link(up_bps=2e6, down_bps=300e6))
    (left,) = plan(fleet(IOWA, SPOT, OLD, slow)).excluded
    assert not any("sync.every" in way for way in left.suggestions)
    assert "a link of 171 Mbps up" in left.suggestions


def test_a_link_that_the_saved_moments_fill_is_left_out_and_says_so() -> None:
    between = replace(HOME, link=Link(up_bps=150e6, down_bps=300e6))
    (left,) = plan(fleet(IOWA, SPOT, OLD, between)).excluded
    assert "needs 171 Mbps up with the moments it saves each 20 rounds, has 150 Mbps" in left.reason


def test_a_link_that_is_faster_than_its_process_is_no_help_and_says_so() -> None:
    fast = [replace(i, link=Link(up_bps=bps, down_bps=100e9)) for i, bps in ((IOWA, 100e9), (SPOT, 1e9), (OLD, 100e9))]
    made = plan(fleet(*fast[:2]), with_sync(every=5))
    (left,) = made.excluded
    assert "needs 2.84 Gbps up, has 1 Gbps (bf16" in left.reason
    assert any("a link of" in way for way in left.suggestions)
    (told,) = [a.text for a in made.assumptions if "at most, less than the link" in a.text]
    assert told == "iowa: a process moves 3.5 Gbps to a bucket at most, less than the link"
    (left,) = plan(fleet(*fast[::2]), with_sync(every=1)).excluded
    assert "needs 14.2 Gbps up, has 3.5 Gbps in one process" in left.reason
    assert not any("a link of" in way for way in left.suggestions)


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ({}, ["the syncer's machine reads and writes 3.5 Gbps (store.link in the inventory)"]),
        ({"up_bps": 1e9}, ["the syncer's machine reads 3.5 Gbps (store.link in the inventory)"]),
        ({"up_bps": 10e9, "down_bps": 1e9}, ["the syncer moves 3.5 Gbps to a bucket at most, less than its link"]),
        ({"up_bps": 1e9, "down_bps": 1e9}, []),
    ],
)
def test_what_a_syncers_link_is_taken_for_is_said(link: dict[str, float], said: list[str]) -> None:
    inventory = fleet(IOWA, SPOT)
    made = plan(replace(inventory, store=replace(inventory.store, link=Link(rtt_s=0.01, **link))))
    assert [a.text for a in made.assumptions if "the syncer" in a.text and "merges" not in a.text] == said


def test_the_peak_that_is_planned_with_is_of_the_type_that_the_learner_uses() -> None:
    """A V100 has no bf16, and the learner no fp16."""
    full = replace(RUN, train=replace(RUN.train, precision="fp32"))
    (old,), (single,) = plan(fleet(OLD)).islands, plan(fleet(OLD), full).islands
    assert old.tokens_per_s == single.tokens_per_s
    assert old.tokens_per_s == pytest.approx(4 * 15.7e12 * 0.3 / model_facts(RUN.model).flops_per_token)
    with pytest.raises(UsageError, match="the fp32 peak of the device TPU-v5p is not known"):
        plan(fleet(replace(IOWA, accelerators=Accelerators("TPU-v5p", 8))), full)


@pytest.mark.parametrize(("name", "lr", "momentum"), [("adamw", 0.4, 0.9), ("muon", 0.7, 0.8)])
def test_outer_settings_left_to_the_plan_fit_its_rounds_and_are_told(name: str, lr: float, momentum: float) -> None:
    train = replace(RUN.train, inner=replace(RUN.train.inner, name=name))
    auto = replace(RUN, train=train, outer=OuterSettings(lr="auto", momentum="auto"))
    found = plan(fleet(IOWA), auto)
    rounds = auto.train.tokens / (IOWA.batch_tokens * 100)
    assert found.run.outer == OuterSettings(lr=lr, momentum=momentum)
    told = {item.name: (item.value, item.origin) for item in found.settings if item.name.startswith("outer.")}
    why = f"auto: {format_count(round(rounds))} rounds of {name}"
    assert told == {"outer.lr": (f"{lr:g}", why), "outer.momentum": (f"{momentum:g}", why)}
    half = plan(fleet(IOWA), replace(auto, outer=OuterSettings(lr=0.6, momentum="auto")))
    assert half.run.outer == OuterSettings(lr=0.6, momentum=momentum)
    short = plan(fleet(IOWA), replace(auto, train=replace(train, tokens=auto.train.tokens // round(rounds / 40))))
    assert (short.run.outer.lr, short.run.outer.momentum) == (0.7, 0.5)
    given = plan(fleet(IOWA), replace(RUN, train=train))
    assert given.run.outer == OuterSettings() and not any(s.name.startswith("outer.") for s in given.settings)


def test_muon_costs_its_products_and_nothing_where_the_speed_is_measured() -> None:
    """A block of a transformer of width d: 280 d^3 FLOPs a step (5 Newton-Schulz steps of 3 products)."""
    inner = replace(RUN.train.inner, name="muon")
    run = replace(RUN, train=replace(RUN.train, inner=inner))
    for of in (IOWA, replace(IOWA, tokens_per_s=5e5)):
        plain, muon = (candidates(each, fleet(of), MODEL)[0] for each in (RUN, run))
        of_a_step = 280 * MODEL.width**3 * MODEL.layers
        slower = of_a_step / plain.batch_tokens / MODEL.flops_per_token if of.tokens_per_s is None else 0.0
        assert plain.tokens_per_s / muon.tokens_per_s == pytest.approx(1 + slower, rel=0.01)


def test_a_measured_speed_beyond_the_device_is_warned_about() -> None:
    """8 A40: 8 x 149.7e12 / 6.805e9 FLOPs a token = 176,000 tokens/s at most."""
    for rate, warned in ((170_000.0, False), (180_000.0, True)):
        measured = replace(IOWA, accelerators=Accelerators("A40", 8), tokens_per_s=rate)
        assert any("of the bf16 peak of 8 x A40" in w for w in plan(fleet(measured)).warnings) is warned


def test_a_slow_download_alone_also_leaves_out():
    narrow = replace(SPOT, link=Link(up_bps=2e9, down_bps=100e6))
    (left,) = plan(fleet(IOWA, narrow)).excluded
    assert "142 Mbps down" in left.reason
    assert " up" not in left.reason


def test_the_fastest_island_is_left_out_if_its_own_round_is_too_short_for_its_link():
    made = plan(fleet(replace(IOWA, link=SLOW_UP), SPOT, OLD))
    assert [i.name for i in made.islands] == ["spot", "old"]
    assert made.islands[0].local_steps == 100


def test_a_model_that_does_not_fit_names_the_accelerators_it_needs():
    big = replace(RUN, model=ModelSettings(parameters=17 * 10**9, layers=54, width=5120, sequence=2048))
    wider = replace(OLD, accelerators=Accelerators("A100-40GB", 4))
    (left,) = plan(fleet(IOWA, wider), big).excluded
    assert left.name == "old"
    assert "GB on each accelerator (fsdp over 4), has 40 GB" in left.reason
    assert "accelerators instead of 4" in left.suggestions[0]


def test_no_island_left_is_infeasible_with_exit_status_3():
    with pytest.raises(InfeasibleError, match=r"no island can take part: home needs 47\.4 Mbps up") as caught:
        plan(fleet(HOME))
    assert caught.value.exit_status == 3
    assert "--set sync.every=" in caught.value.hint


def test_a_quorum_beyond_the_islands_is_infeasible_and_says_what_is_possible():
    with pytest.raises(InfeasibleError, match="the quorum of 4 is out of reach, 3 can take part") as caught:
        plan(fleet(), with_sync(quorum=4))
    assert "--set sync.quorum=3" in caught.value.hint


def test_overlap_auto_hides_the_exchange_and_leaves_a_slot_of_slack():
    schedule = plan(fleet()).schedule
    assert schedule.overlap * schedule.slot_s - schedule.exchange_s == pytest.approx(schedule.slack_s)
    assert schedule.slot_s <= schedule.slack_s < 2 * schedule.slot_s
    assert 0 < schedule.grace_s <= min(schedule.slot_s, 0.5 * schedule.slack_s)


def test_a_chosen_overlap_that_is_too_short_warns_with_the_one_needed():
    slower = Link(up_bps=3e8, down_bps=3e8, rtt_s=0.005)
    linked = fleet(*(replace(IOWA, name=name, link=slower) for name in ("one", "two")))  # alike: neither is left out
    needed = plan(linked).schedule.overlap
    made = plan(linked, with_sync(overlap=1))
    assert made.schedule.grace_s == 0
    assert any(f"--set sync.overlap={needed}" in warning for warning in made.warnings)
    assert made.prediction.tokens_per_s < plan(linked).prediction.tokens_per_s


def test_an_emulated_slowdown_halves_the_speed_and_the_local_steps():
    twin = replace(IOWA, name="slow", slowdown=2.0)
    fast, slow = plan(fleet(IOWA, twin)).islands
    assert slow.step_s == pytest.approx(2 * fast.step_s)
    assert (fast.local_steps, slow.local_steps) == (100, 50)


def test_a_batch_that_is_no_whole_number_of_sequences_is_refused():
    with pytest.raises(UsageError, match="iowa: a batch of 5000 tokens is no whole number of sequences of 2048"):
        plan(fleet(replace(IOWA, batch_tokens=5000)))


def test_failures_cost_their_share_and_synchronous_training_more():
    failing = [replace(i, mtbf_s=3600.0, restart_s=400.0) for i in (IOWA, SPOT, OLD)]
    keeping = with_sync(mixing="rebase")
    prediction = plan(fleet(*failing), keeping).prediction
    assert prediction.goodput == pytest.approx(0.9 * (1 - 0.1**3), rel=0.03)
    assert prediction.synchronous_goodput <= 0.9**3
    assert prediction.quorum_probability == pytest.approx(1 - 0.1**3)
    assert [stage.name for stage in prediction.waterfall] == [
        "ideal",
        "after idle",
        "after link",
        "after failures",
    ]


def test_the_presets_on_one_core_are_predicted_as_measured():
    for preset, expected in (("gpt-nano", 30_000), ("gpt-micro", 15_000)):
        run = replace(RUN, model=ModelSettings(preset=preset), train=TrainSettings(batch_tokens=1024))
        (core,) = plan(fleet(IslandSettings("core", "here", Accelerators("cpu"))), run).islands
        assert core.tokens_per_s == pytest.approx(expected, rel=0.1)


def test_the_templates_can_be_planned():
    folder = templates_directory()
    run = load_run(folder / "run.yaml")
    made = make_plan(run, load_inventory(folder / "inventory.yaml"), model_facts(run.model))
    assert made.warnings == ()
    assert [i.shards for i in made.islands] == ["ddp over 8", "ddp over 8", "ddp over 4", "ddp over 2"]


def test_a_device_that_is_too_small_for_all_that_may_be_on_its_way_is_named():
    """It has room for the fragments in flight of a fast link, and not for those of a slow one."""
    slow = Link(up_bps=200e6, down_bps=200e6, rtt_s=5.0)
    small = replace(find_device(OLD.accelerators.name, {}), memory_gb=13.5)
    islands = fleet(IOWA, replace(OLD, link=slow))
    made = plan(replace(islands, devices={OLD.accelerators.name: small}))
    (old,) = (island for island in made.islands if island.name == "old")
    assert made.schedule.overlap > 5 and not old.fits
    assert any("with all that may be on its way it needs" in warning for warning in old.warnings)


def test_every_stage_of_the_waterfall_is_at_most_the_one_before() -> None:
    for mixing in ("replace", "rebase"):
        everyone = candidates(RUN, fleet(), MODEL)
        for flow in run_fleet(everyone, with_sync(mixing=mixing).sync, MODEL).flows:
            assert flow.ideal >= flow.after_idle >= flow.after_link >= flow.after_failures > 0


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
