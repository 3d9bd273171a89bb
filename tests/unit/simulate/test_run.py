"""A whole run in virtual time: what faults do to it, what it counts, and the tape that it leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.config.settings import InnerSettings, Link, RunSettings, SyncSettings, TrainSettings
from diloco_cli.errors import UsageError
from diloco_cli.faults.timetable import Injection
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.keys import commit_key
from diloco_cli.protocol.records import Commit, Island, RunFormat
from diloco_cli.protocol.wire import decode
from diloco_cli.simulate.fleet import Hardware, SimulatedFleet
from diloco_cli.simulate.what_if import Price, WhatIf, report, simulated
from diloco_cli.tapes.needs import needs_of
from diloco_cli.tapes.recorder import record

STEP_S, BATCH = 0.1, 100
FRAGMENT_BYTES = 1_000_000 * 2  # a million parameters in bf16


def make_run(learners: int = 3, seconds: float = 40.0, up_bps: float | None = 1e9, **sync: Any) -> RunFormat:
    """Equal islands of 1,000 tokens/s, four fragments, a slot of 0.6 s; undisturbed it lasts about `seconds`."""
    settings = RunSettings(
        name="sim",
        train=TrainSettings(
            tokens=round(seconds / STEP_S * BATCH * learners), batch_tokens=BATCH, inner=InnerSettings(save_every=5)
        ),
        sync=replace(SyncSettings(every=24, fragments=4, mixing="rebase", skip_after_s=5.0), **sync),
    )
    link = Link(up_bps, 1e9, 0.01)
    islands = tuple(
        Island(f"l{i}", "west" if i else "east", BATCH, 24, BATCH / STEP_S, STEP_S, link=link) for i in range(learners)
    )
    layout = balanced_layout([ParameterFact(f"w{i}", (1_000_000,), False) for i in range(4)], 4)
    return RunFormat("id", "sim", "2000-01-01T00:00:00.000Z", settings, islands, layout, "test")


def play(run: RunFormat, *faults: Injection, within_s: float = 200.0, seed: int = 0) -> tuple[WhatIf, SimulatedFleet]:
    fleet = simulated(run, {}, faults, seed, within_s)
    return report(fleet, {"l0": Price(per_h=3600.0, egress_per_gb=1.0)}), fleet


def test_an_undisturbed_run_merges_everybody_and_ends() -> None:
    found, _ = play(make_run())
    assert found.finished and found.tokens >= found.tokens_target
    assert found.participation == 1.0 and found.skips == 0
    assert found.goodput > 0.9
    assert all(island.stalled_s == island.down_s == 0 for island in found.islands)
    assert all(island.incarnations == 1 for island in found.islands)


def test_bytes_and_money_are_counted() -> None:
    found, fleet = play(make_run())
    first = found.islands[0]
    offers = first.merges + first.offers_refused
    saves = first.tokens_processed // BATCH // (5 * 24)
    assert first.bytes_up == pytest.approx(offers * FRAGMENT_BYTES + saves * 4_000_000 * 8, abs=2 * FRAGMENT_BYTES)
    assert first.cost == pytest.approx(found.simulated_s + first.bytes_up / 1e9)
    assert found.cost == first.cost  # nobody else has a price
    assert found.bytes_up == sum(island.bytes_up for island in found.islands)
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


def test_a_dead_syncer_stops_nobody_up_to_the_drift_bound_and_the_next_one_goes_on() -> None:
    short, _ = play(make_run(), Injection(0, 10.0, "kill", ("syncer",), revive_after_s=3.0))
    assert short.finished and short.epochs == 2
    assert all(island.stalled_s == 0 for island in short.islands)
    # 4 rounds of 24 steps of 0.1 s are 9.6 s: of 30 s without a commit, about 20 s are spent waiting
    long, _ = play(make_run(), Injection(0, 10.0, "kill", ("syncer",), revive_after_s=30.0))
    assert long.finished
    assert all(island.stalled_s == pytest.approx(20.4, abs=1.5) for island in long.islands)


def test_a_blackout_loses_no_commit() -> None:
    names = ("l0", "l1", "l2", "syncer")
    found, fleet = play(make_run(), Injection(0, 10.0, "kill", names, revive_after_s=5.0))
    assert found.finished and found.epochs == 2
    assert [island.incarnations for island in found.islands] == [2, 2, 2]
    assert fleet.state.n + 1 == found.commits


def test_a_partitioned_learner_steps_on_and_resumes_by_itself() -> None:
    found, _ = play(make_run(), Injection(0, 10.0, "partition", ("l2",), for_s=5.0))
    assert found.finished and found.islands[2].incarnations == 1
    assert found.islands[2].stalled_s == 0 and found.islands[2].merges < found.islands[0].merges
    assert found.islands[2].goodput == pytest.approx(found.islands[0].goodput, abs=0.02)  # its progress was kept
    cut, _ = play(make_run(), Injection(0, 10.0, "partition", ("l2",), for_s=20.0))
    assert cut.islands[2].stalled_s == pytest.approx(20.0 - 9.6, abs=1.5)  # the drift bound, as above


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
    records = [decode(Commit, fleet.world.store.get(commit_key(n)) or b"", "") for n in range(found.commits)]
    fates = {(fate.learner, fate.reason) for record in records for fate in record.fates}
    assert {("l0", "digest_mismatch"), ("l1", "norm_cap")} <= fates
    assert not any(reason in ("digest_mismatch", "norm_cap") for learner, reason in fates if learner == "l2")


def test_a_second_syncer_takes_over_and_the_first_is_fenced() -> None:
    found, fleet = play(make_run(), Injection(0, 10.0, "second-syncer", ("syncer",)))
    assert found.finished and found.epochs == 2
    assert [type(actor.error).__name__ for actor in fleet.syncers] == ["FencedError", "NoneType"]


def test_failures_of_the_hardware_come_from_the_seed() -> None:
    run, hardware = make_run(seconds=60.0), {"l0": Hardware(mtbf_s=15.0, restart_s=4.0)}
    first, second, other = (report(simulated(run, hardware, (), seed, 60.0), {}) for seed in (1, 1, 2))
    assert first == second != other
    assert first.islands[0].incarnations > 1 and first.islands[1].incarnations == 1


def test_without_quorum_the_survivor_waits_at_the_drift_bound_and_slots_are_skipped_at_most() -> None:
    found, _ = play(
        make_run(2, quorum=2), Injection(0, 10.0, "kill", ("l1",), revive_after_s=60.0), within_s=60.0
    )  # fmt: skip
    assert not found.finished
    assert found.islands[0].stalled_s > 30


def test_the_tape_of_a_stormy_run_is_recorded_as_from_any_bucket() -> None:
    faults = (
        Injection(0, 6.0, "kill", ("l1",), revive_after_s=2.0),
        Injection(1, 9.0, "kill", ("syncer",), revive_after_s=2.0),
    )
    found, fleet = play(make_run(seconds=15.0), *faults)
    tape = record(fleet.world.store, fleet.run)
    assert len(tape.merges) == found.merges
    assert {(track.learner, track.incarnation) for track in tape.tracks} >= {("l0", 1), ("l1", 1), ("l1", 2)}
    assert tape.merges[-1].tokens == found.tokens
    needs_of(tape)  # raises if the tape contradicts itself


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot do disk-full; it can do kill"):
        play(make_run(), Injection(0, 1.0, "disk-full", ("l0",), for_s=1.0))
    with pytest.raises(UsageError, match="cannot partition the syncer"):
        play(make_run(), Injection(0, 1.0, "partition", ("syncer",), for_s=1.0))
