"""A whole run in virtual time: what faults do to it, and what it counts."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import (
    InnerSettings,
    Inventory,
    IslandSettings,
    Link,
    RegionSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.errors import FencedError, UsageError
from diloco_cli.faults import Injection, load_scenario, timetable
from diloco_cli.forecast.fleet import RESTART_S, START, Hardware, SimulatedFleet, StartUps, start_ups, units_of
from diloco_cli.forecast.outlook import outlook, rivalry
from diloco_cli.forecast.run import (
    BRIEF,
    DAY_S,
    LONG,
    Price,
    RunForecast,
    confirmed,
    goodput_under,
    not_charged,
    prices_of_plan,
    report,
    run_of_plan,
    simulated,
)
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.paths import templates_directory
from diloco_cli.plan.link import CLIENT_BPS, machine_of
from diloco_cli.plan.plan import Goal, Plan
from diloco_cli.plan.planner import make_plan
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.operations import Get
from diloco_cli.protocol.log.records import Island, RunFormat, decode
from diloco_cli.protocol.rules.capacity import SyncerMachine
from diloco_cli.virtual.world import Actor
from tests.studies.plans import case
from tests.unit.plan import fleets

STEP_S, BATCH = 0.1, 100
SLOT_S = 6 * STEP_S
FRAGMENT_BYTES = 1_000_000 * 2  # a million parameters in bf16
NEAR = SyncerMachine(0.001, None, None, 1.6e9)


def make_run(
    learners: int = 3, seconds: float = 40.0, up_bps: float | None = 1e9, step_s: float = STEP_S, **sync: Any
) -> RunFormat:
    """Equal islands of 1,000 tokens/s, four fragments, a slot of 6 steps; undisturbed it lasts about `seconds`."""
    settings = RunSettings(
        name="sim",
        train=TrainSettings(
            tokens=round(seconds / step_s * BATCH * learners), batch_tokens=BATCH, inner=InnerSettings(save_every=5)
        ),
        sync=replace(SyncSettings(every=24, fragments=4, mixing="rebase", skip_after_s=5.0), **sync),
    )
    link = Link(up_bps, 1e9, 0.01)
    islands = tuple(
        Island(f"l{i}", "west" if i else "east", BATCH, 24, BATCH / step_s, step_s, link=link) for i in range(learners)
    )
    layout = balanced_layout([ParameterFact(f"w{i}", (1_000_000,), False) for i in range(4)], 4)
    return RunFormat("id", "sim", "2000-01-01T00:00:00.000Z", settings, islands, layout, "test")


def play(
    run: RunFormat, *faults: Injection, within_s: float = 200.0, seed: int = 0
) -> tuple[RunForecast, SimulatedFleet]:
    fleet = simulated(run, {}, faults, seed, within_s, NEAR)
    return report(fleet, {"l0": Price(per_h=3600.0, egress_per_gb=1.0)}), fleet


def test_an_undisturbed_run_merges_everybody_and_ends() -> None:
    found, _ = play(make_run())
    assert found.finished and found.tokens >= found.tokens_target
    assert found.participation == 1.0 and found.skips == 0
    assert found.goodput > 0.9
    assert all(island.stalled_s == island.down_s == 0 for island in found.islands)
    assert all(island.incarnations == 1 for island in found.islands)


def test_slots_of_minutes_are_merged_with_all_of_unlike_islands() -> None:
    """Slots of 100 s, which the slowest island may reach a minute after the fastest: none is skipped for the later
    offers of the others, though `skip_after` is 60 s."""
    run = make_run(seconds=0.75 * 3600.0, step_s=100.0, every=4, quorum=3, skip_after_s=60.0)
    places = zip(run.islands, (100.0, 130.0, 180.0), (4, 3, 2), strict=True)
    islands = tuple(replace(i, step_s=s, tokens_per_s=BATCH / s, local_steps=steps) for i, s, steps in places)
    found, _ = play(replace(run, islands=islands), within_s=2 * 3600.0)
    assert found.finished and found.skips == 0 and found.participation > 0.95


def test_bytes_and_money_are_counted() -> None:
    found, fleet = play(make_run())
    first = found.islands[0]
    offers = first.merges + first.offers_refused
    saves = first.tokens_processed // BATCH // (5 * 24)
    assert first.up_bytes == pytest.approx(offers * FRAGMENT_BYTES + saves * 4_000_000 * 8, abs=2 * FRAGMENT_BYTES)
    assert first.cost == pytest.approx(found.simulated_s + first.up_bytes / 1e9)
    assert found.cost == first.cost  # nobody else has a price
    assert found.up_bytes == sum(island.up_bytes for island in found.islands)
    assert first.tokens_merged == fleet.state.learner("l0").token_parameters // 4_000_000


def test_the_same_arguments_give_the_same_bucket_to_the_byte() -> None:
    fault = Injection(0, 5.0, "kill", ("l1",), revive_after_s=3.0)
    buckets = []
    for _ in range(2):
        _, fleet = play(make_run(seconds=15.0), fault, within_s=20.0)
        keys = fleet.world.store.list("", limit=1_000_000)
        buckets.append({key: fleet.world.store.get(key) for key in keys})
    assert buckets[0] == buckets[1] and len(buckets[0]) > 100


def test_a_killed_learner_comes_back_as_a_new_incarnation_and_nobody_else_notices() -> None:
    found, fleet = play(make_run(), Injection(0, 10.0, "kill", ("l1",), revive_after_s=5.0))
    by_name = {island.name: island for island in found.islands}
    assert by_name["l1"].incarnations == 2 and by_name["l1"].down_s == pytest.approx(5.0)
    assert by_name["l0"].incarnations == 1 and by_name["l0"].stalled_s == 0
    assert found.finished and by_name["l1"].goodput < by_name["l0"].goodput
    assert fleet.log == ["10.000 s  #0 kill l1"]


def test_a_killed_unit_comes_back_after_as_long_as_the_run_has_shown() -> None:
    shown = StartUps({"l0": [(1, 3.0), (3, 9.0)], "l1": [(1, 3.0), (4, 9.0)]})
    faults = Injection(0, 10.0, "kill", ("l0",)), Injection(1, 20.0, "kill", ("l0", "l1", "l2"), revive_after_s=1.0)
    fleet = simulated(make_run(), {}, faults, 0, 35.0, NEAR, starts=shown)
    down_s = [fleet.conditions[name].down_s for name in ("l0", "l1", "l2")]
    assert down_s == pytest.approx([3.2 + 1.2 + 9.0, 1.2 + 9.0, 1.0]), "several at once share the cores"
    usual = simulated(make_run(1), {}, faults[:1], 0, 10.0 + RESTART_S, NEAR)
    assert usual.conditions["l0"].down_s == RESTART_S


def test_what_a_run_has_shown_of_its_start_ups() -> None:
    """Two start together at 0 s; one alone at 50 s; one at 60 s dies before its claim."""
    started = {"l0": [0.0, 60.0, 70.0], "l1": [0.5, 50.0], "l2": [90.0]}
    claimed = {"l0": [4.0, 72.0], "l1": [4.5, 53.0], "l2": [89.0]}
    found = start_ups(started, claimed)
    assert found.seen == {"l0": [(2, 4.0), (1, 2.0)], "l1": [(2, 4.0), (1, 3.0)]}
    assert [found.of("l1", at_once) for at_once in (1, 2, 9)] == [3.0, 4.0, 4.0] and found.of("l2", 1) is None


def test_a_dead_syncer_stops_nobody_up_to_the_drift_bound_and_the_next_one_goes_on() -> None:
    short, _ = play(make_run(), Injection(0, 10.0, "kill", ("syncer",), revive_after_s=3.0))
    assert short.finished and short.epochs == 2
    assert all(island.stalled_s == 0 for island in short.islands)
    # 4 rounds of 24 steps of 0.1 s are 9.6 s: of 30 s without a commit, about 20 s are spent waiting, and a second or
    # two while the next one reads the log
    long, _ = play(make_run(2, seconds=20.0), Injection(0, 10.0, "kill", ("syncer",), revive_after_s=30.0))
    assert long.finished
    assert all(island.stalled_s == pytest.approx(21.4, abs=1.5) for island in long.islands)


def test_a_partitioned_learner_steps_on_and_resumes_by_itself() -> None:
    """It loses what it trained meanwhile, for the others went on without it; and is in the next merge."""
    found, fleet = play(make_run(), Injection(0, 10.0, "partition", ("l2",), for_s=5.0))
    other, cut_off = found.islands[0], found.islands[2]
    assert found.finished and cut_off.incarnations == 1 and cut_off.stalled_s == 0
    assert cut_off.tokens_processed == other.tokens_processed
    lost_s = (other.tokens_merged - cut_off.tokens_merged) / BATCH * STEP_S
    assert lost_s == pytest.approx(5.0, abs=SLOT_S + STEP_S)
    without = [
        at_s
        for record, at_s in zip(_commits(fleet), _commit_times(fleet), strict=True)
        if record.kind == "merge" and "l2" not in {item.learner for item in record.inputs}
    ]
    assert len(without) == other.merges - cut_off.merges > 5
    assert min(without) > 10.0 and max(without) < 15.0 + SLOT_S
    cut, _ = play(make_run(2), Injection(0, 10.0, "partition", ("l1",), for_s=20.0), within_s=32.0)
    assert cut.islands[1].stalled_s == pytest.approx(20.0 - 9.6, abs=1.5)  # the drift bound, as above


def test_a_full_or_failing_store_of_one_learner_costs_its_merges_alone() -> None:
    run = make_run(seconds=25.0)
    usual, _ = play(run)
    for fault in (
        Injection(0, 10.0, "full", ("l2",), for_s=10.0),
        Injection(0, 10.0, "errors", ("l2",), for_s=10.0, share=0.9),
    ):
        found, _ = play(run, fault)
        lost = [before.merges - after.merges for before, after in zip(usual.islands, found.islands, strict=True)]
        assert found.finished and lost[2] >= 5 and max(lost[:2]) <= 1, (fault.kind, lost)
    assert play(run, fault)[0] == found


def test_a_pause_is_a_straggler_that_catches_up() -> None:
    found, _ = play(make_run(), Injection(0, 10.0, "pause", ("l1",), for_s=6.0))
    assert found.finished and found.islands[1].stalled_s == pytest.approx(6.0)
    lost = found.islands[0].tokens_processed - found.islands[1].tokens_processed
    assert lost * STEP_S / BATCH == pytest.approx(6.0, abs=0.3)


def test_a_slow_link_costs_participation_and_is_slow_only_for_its_time() -> None:
    usual, _ = play(make_run(up_bps=1e8))
    slow, fleet = play(make_run(up_bps=1e8), Injection(0, 5.0, "slow", ("l0",), for_s=20.0, factor=20.0))
    assert slow.islands[0].merges < usual.islands[0].merges
    assert (slow.participation or 0) < (usual.participation or 0)
    assert fleet.conditions["l0"].slow == 1.0


def test_damaged_deltas_are_refused_and_the_run_goes_on() -> None:
    faults = (Injection(0, 5.0, "corrupt", ("l0",)), Injection(1, 8.0, "poison", ("l1",)))
    found, fleet = play(make_run(), *faults)
    assert found.finished
    outcomes = {(outcome.learner, outcome.reason) for record in _commits(fleet) for outcome in record.outcomes}
    assert {("l0", "digest_mismatch"), ("l1", "bad_norms")} <= outcomes
    assert not any(reason in ("digest_mismatch", "bad_norms") for learner, reason in outcomes if learner == "l2")


def test_failures_of_the_hardware_come_from_the_seed() -> None:
    run, hardware = make_run(seconds=30.0), {"l0": Hardware(mtbf_s=15.0, restart_s=4.0)}
    first, second, other = (report(simulated(run, hardware, (), seed, 30.0, NEAR), {}) for seed in (1, 1, 2))
    assert first == second != other
    assert first.islands[0].incarnations > 1 and first.islands[1].incarnations == 1


def test_without_quorum_the_survivor_waits_at_the_drift_bound_and_slots_are_skipped_at_most() -> None:
    found, _ = play(
        make_run(2, quorum=2), Injection(0, 10.0, "kill", ("l1",), revive_after_s=60.0), within_s=60.0
    )  # fmt: skip
    assert not found.finished
    assert found.islands[0].stalled_s > 30


@pytest.mark.parametrize("path", sorted((templates_directory() / "chaos").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_run_survives_every_built_in_scenario(path: Path) -> None:
    story, run = load_scenario(path), make_run(seconds=600.0, step_s=1.0)
    faults = timetable(story, units_of(run))
    found, fleet = play(run, *faults, within_s=story.duration_s)
    assert found.warnings == () and found.faults_injected == sum(not fault.skipped for fault in faults) > 0
    assert found.goodput > 0.7 and all(island.stalled_percent <= 100 for island in found.islands)
    fenced = sum(isinstance(actor.error, FencedError) for actor in fleet.syncers)
    assert fenced == sum(fault.kind == "second-syncer" for fault in faults)
    assert ("second-syncer" in path.read_text()) == (path.stem in ("two-syncers", "zombie"))


def test_a_zombie_syncer_wakes_after_another_took_its_place_and_changes_nothing() -> None:
    pause = Injection(0, 10.0, "pause", ("syncer",), for_s=8.0)
    found, fleet = play(make_run(), pause, Injection(1, 13.0, "second-syncer", ("syncer",)))
    zombie, successor = fleet.syncers
    assert isinstance(zombie.error, FencedError) and successor.error is None
    assert found.finished and found.epochs == 2 and found.faults_injected == 2
    epochs = [record.epoch for record in _commits(fleet)]
    assert epochs == sorted(epochs) and set(epochs) == {1, 2}


def _commits(fleet: SimulatedFleet) -> list[Commit]:
    return [decode(Commit, fleet.world.store.get(commit_key(n)) or b"", "") for n in range(fleet.state.n + 1)]


def _commit_times(fleet: SimulatedFleet) -> list[float]:
    """Of each commit, on the virtual clock."""
    return [(datetime.fromisoformat(record.time) - START).total_seconds() for record in _commits(fleet)]


def test_a_pause_counts_while_it_lasts_and_somebody_is_paused() -> None:
    beyond, _ = play(make_run(), Injection(0, 15.0, "pause", ("l1",), for_s=100.0), within_s=30.0)
    assert beyond.simulated_s == pytest.approx(30.0)
    assert beyond.islands[1].stalled_s == pytest.approx(15.0) and beyond.islands[1].stalled_percent == pytest.approx(50)
    killed = (
        Injection(0, 10.0, "pause", ("l1",), for_s=10.0),
        Injection(1, 13.0, "kill", ("l1",), revive_after_s=2.0),
        Injection(2, 16.0, "pause", ("l1",), for_s=8.0),
    )
    again, _ = play(make_run(), *killed, within_s=30.0)
    assert again.islands[1].stalled_s == pytest.approx(3.0 + 8.0) and again.islands[1].down_s == pytest.approx(2.0)


def test_a_fault_without_effect_is_said() -> None:
    faults = (
        Injection(0, 5.0, "kill", ("l1", "syncer"), revive_after_s=5.0),
        Injection(1, 6.0, "kill", ("l0", "l1"), revive_after_s=1.0),
        Injection(2, 6.5, "pause", ("syncer",), for_s=1.0),
        Injection(3, 7.0, "slow", ("l2",), for_s=1.0, factor=9.0),
        Injection(4, 8.0, "kill", ("supervisor",)),
    )
    run = make_run()
    unknown = replace(run.islands[2], link=Link())
    found, fleet = play(replace(run, islands=(*run.islands[:2], unknown)), *faults)
    assert found.finished and len(fleet.syncers) == 2
    assert list(found.log) == [
        "5.000 s  #0 kill l1, syncer",
        "6.000 s  #1 kill l0, l1; no effect on l1: it is down",
        "6.500 s  #2 pause syncer; no effect on syncer: it is down",
        "7.000 s  #3 slow l2; no effect on l2: the rate of its link is unknown",
        "8.000 s  #4 kill supervisor; no effect on supervisor: units go on without it",
    ]
    assert found.islands[1].stalled_s == 0
    assert found.warnings == ("without effect: #1 kill l1 at 6 s, since it is down; and 3 more",)


def test_a_fault_that_never_happens_is_said() -> None:
    faults = (Injection(0, 5.0, "pause", ("l1",), for_s=1.0), Injection(1, 300.0, "kill", ("l0",), revive_after_s=1.0))
    ended, _ = play(make_run(seconds=10.0), *faults, within_s=400.0)
    assert ended.finished and ended.faults_injected == 1
    assert ended.warnings[0].startswith("1 of 2 planned faults happened: the run ended after 1")
    assert ended.warnings[0].endswith("and the next, kill l0, was due at 5 min")
    short, _ = play(make_run(), *faults, within_s=3.0)
    assert short.warnings == (
        "0 of 2 planned faults happened: the simulated time ended after 3 s, and the next, pause l1, was due at 5 s",
    )
    forbidden, _ = play(make_run(), *(replace(fault, skipped="l1 is protected") for fault in faults), within_s=3.0)
    assert forbidden.warnings == ("0 of 2 faults happened: the scenario's constraints forbid them all",)
    unsent, _ = play(make_run(), Injection(0, 2.9, "corrupt", ("l2",)), within_s=3.0)
    assert unsent.warnings == ("without effect: a corrupt or poison of l2, which sent no delta after it",)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(UsageError, match="a simulated run cannot do slow to the supervisor"):
        play(make_run(), Injection(0, 1.0, "slow", ("supervisor",), for_s=1.0, factor=2.0))
    for kind in ("slow", "corrupt", "poison"):
        with pytest.raises(UsageError, match=f"#7 at 1 s: a simulated run cannot do {kind} to the syncer") as caught:
            play(make_run(), Injection(7, 1.0, kind, ("l0", "syncer"), for_s=1.0))  # type: ignore[arg-type]
        assert "all" not in caught.value.hint.split()
    with pytest.raises(UsageError, match="second-syncer starts a syncer"):
        play(make_run(), Injection(0, 1.0, "second-syncer", ("l0",)))


PAYING = (
    fleets.island("iowa", price_per_h=32.0, egress_per_gb=0.05),
    replace(fleets.island("spot", "A100-80GB-SXM", batch=262_144, price_per_h=14.0, egress_per_gb=0.02), region="eu"),
)


def of_plan(inventory: Inventory, rounds: int = 40) -> tuple[Plan, RunForecast, SimulatedFleet]:
    """So many rounds of a plan with four fragments."""
    plan = make_plan(fleets.with_sync(fragments=4), inventory, fleets.MODEL)
    made, machine = run_of_plan(plan, "simulated", "test"), machine_of(plan.inventory.store)
    fleet = simulated(made, {}, (), 0, rounds * plan.schedule.round_s, machine)
    return plan, report(fleet, prices_of_plan(plan), not_charged(plan)), fleet


def test_a_plans_run_costs_what_the_plan_says() -> None:
    """`iowa` is in its bucket's region, where egress is free; forty rounds send the moments twice."""
    inventory = fleets.fleet(*PAYING)
    at_home = replace(inventory, store=replace(inventory.store, region="here"))
    plan, found, _ = of_plan(at_home)
    assert plan.money.egress_per_day > 0
    per_day = 24 * plan.money.accelerators_per_h + plan.money.egress_per_day
    assert found.cost / found.simulated_s * DAY_S == pytest.approx(per_day, rel=0.01)
    assert found.islands[0].cost == pytest.approx(32.0 * found.simulated_s / 3600)
    assert found.not_charged == ("requests", "storage")
    own = replace(at_home, regions={"eu": RegionSettings("gs://eu", 0.08)})
    _, mirrored, _ = of_plan(own, rounds=1)
    assert mirrored.not_charged == ("requests", "storage", "mirrors")
    assert mirrored.islands[1].cost == pytest.approx(14.0 * mirrored.simulated_s / 3600)


def test_a_plans_syncer_has_the_processor_the_link_and_the_calls_of_the_plan() -> None:
    plan, _, played = of_plan(fleets.fleet(*PAYING), rounds=1)
    assert played.merge_s == pytest.approx(plan.syncer.processor_s)
    assert played.latency_s == 0.05 and played.syncer_link == Link(CLIENT_BPS, CLIENT_BPS)
    near = replace(plan.inventory, store=replace(plan.inventory.store, link=Link(1e9, None, 0.02)))
    _, _, played = of_plan(near, rounds=1)
    assert played.latency_s == 0.02 and played.syncer_link == Link(1e9, CLIENT_BPS)


def test_an_islands_calls_take_its_rtt_and_others_those_of_the_syncer() -> None:
    run = make_run(learners=2)
    islands = (replace(run.islands[0], link=Link(rtt_s=0.11)), replace(run.islands[1], link=Link()))
    fleet = simulated(replace(run, islands=islands), {}, (), 0, 1.0, SyncerMachine(0.04, None, None, 1.6e9))
    calls = [fleet._latency_s(Actor(name, iter(())), Get("hint", 9)) for name in ("l0", "l1", "syncer")]  # type: ignore[arg-type]
    assert calls == pytest.approx([0.11, 0.04, 0.04])


def test_a_plan_is_confirmed_by_its_own_run_and_says_by_how_much_it_was_off_at_length_and_briefly() -> None:
    plan, seen = make_plan(fleets.with_sync(fragments=12), fleets.fleet(), fleets.MODEL), list[float]()
    long, brief = confirmed(plan, lambda fleet, seconds: seen.append(seconds)), confirmed(plan, span=BRIEF)
    assert long.planned_tokens_per_s == plan.prediction.waterfall[-2].tokens_per_s
    assert long.tokens_per_s == pytest.approx(long.planned_tokens_per_s, rel=0.03)
    assert long.off_percent == pytest.approx(100 * (long.planned_tokens_per_s / long.tokens_per_s - 1))
    assert seen == [pytest.approx(long.simulated_s)]
    assert brief.simulated_s < 0.6 * long.simulated_s
    assert brief.tokens_per_s == pytest.approx(long.tokens_per_s, rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_brief_confirmations_of_searched_plans_are_right_to_three_percent(seed: int) -> None:
    """Where merges were counted from 1.75 rounds on, the first of them was 8 % too slow."""
    plan = case(seed).plan()
    assert plan is not None
    brief, long = (confirmed(plan, span=span) for span in (BRIEF, LONG))
    assert brief.tokens_per_s == pytest.approx(long.tokens_per_s, rel=0.03)


def test_with_links_and_speeds_off_a_run_merges_what_the_outlook_says() -> None:
    def planned(factor: float) -> Plan:
        def changed(island: IslandSettings) -> IslandSettings:
            up, down = (bps and factor * bps for bps in (island.link.up_bps, island.link.down_bps))
            link = replace(island.link, up_bps=up, down_bps=down)
            return replace(island, mfu=factor * (island.mfu or 0), mtbf_s=None, link=link)

        islands = [changed(island) for island in (fleets.IOWA, fleets.SPOT)]
        return make_plan(fleets.with_sync(fragments=12), fleets.fleet(*islands), fleets.MODEL)

    found = outlook(planned(1.0))
    assert (found.histories, found.failures_percent) == (0, 100.0)
    lower, higher = (confirmed(planned(factor), span=BRIEF).tokens_per_s for factor in (0.8, 1.2))
    assert 0.99 * found.least_tokens_per_s < lower < 1.03 * found.least_tokens_per_s
    assert 0.97 * found.most_tokens_per_s < higher < 1.01 * found.most_tokens_per_s
    full = planned(1.0)
    busy = replace(full, syncer=replace(full.syncer, busy_percent=90.0))
    assert outlook(busy).most_tokens_per_s == pytest.approx(found.tokens_per_s / 0.9)


def test_failures_leave_what_histories_as_long_as_the_run_leave() -> None:
    plan = make_plan(fleets.with_sync(fragments=12), fleets.fleet(fleets.SPOT, fleets.IOWA), fleets.MODEL)
    found, stages = outlook(plan), plan.prediction.waterfall
    assert found.histories == 8
    assert found.failures_percent == pytest.approx(100 * stages[-1].tokens_per_s / stages[-2].tokens_per_s, abs=2.0)
    assert found.plan_off_percent == pytest.approx(0.0, abs=3.0)
    assert found.least_tokens_per_s < 0.8 * found.tokens_per_s
    assert found.most_tokens_per_s > 1.2 * found.tokens_per_s


def test_rivals_are_played_while_there_is_time_and_ranked_by_what_the_goal_asks_for() -> None:
    plan = make_plan(fleets.with_sync(fragments=12), fleets.fleet(fleets.SPOT, fleets.IOWA), fleets.MODEL)
    alone = make_plan(fleets.with_sync(fragments=12), fleets.fleet(fleets.IOWA), fleets.MODEL)
    found = outlook(plan)
    (rival,) = rivalry(plan, found, [alone], BRIEF)
    assert (
        rival.better_percent == pytest.approx(100 * (rival.tokens_per_s / found.tokens_per_s - 1))
        and rival.better_percent < 0
    )
    cheaper = replace(plan, goal=Goal("cost"))
    (rival,) = rivalry(cheaper, found, [replace(alone, goal=Goal("cost"))], BRIEF)
    shown = 100 * (plan.money.total / alone.money.total - 1)
    assert rival.better_percent == pytest.approx(shown, abs=5.0)
    assert rivalry(plan, found, [alone], replace(BRIEF, most_offers=1)) == []
    assert rivalry(plan, replace(found, tokens_per_s=0.0), [alone], BRIEF) == []


def test_what_takes_too_long_to_confirm_is_not_begun() -> None:
    islands = [fleets.island(f"i{n:02}", batch=65_536) for n in range(64)]
    many = make_plan(fleets.with_sync(fragments=384), fleets.fleet(*islands), fleets.MODEL)
    with pytest.raises(UsageError, match="simulated offers, more than"):
        confirmed(many)


def test_what_a_storm_costs_is_predicted_by_the_same_run_without_it() -> None:
    run = make_run(seconds=5.0)  # the prediction does not end with its target
    away = Injection(0, 10.0, "kill", ("l0",), revive_after_s=20.0)
    assert goodput_under(run, (), 0, 60.0, NEAR) == pytest.approx(1.0, abs=0.02)
    assert goodput_under(run, (away,), 0, 60.0, NEAR) == pytest.approx(1 - 20 / 50 / 3, abs=0.03)
    assert goodput_under(run, (away,), 0, 1e7, NEAR) is None, "it would take long"
