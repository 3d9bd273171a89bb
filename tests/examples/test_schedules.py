"""Synthetic tapes: who merges what when, by hand and by property. No torch."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from diloco_cli.config.settings import GraceSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.errors import RunFailedError, UsageError
from diloco_cli.forecast.chips import equal_learners, generator, walk
from diloco_cli.forecast.goodput import PUBLISHED
from diloco_cli.layout import ParameterFact, make_layout
from diloco_cli.protocol.log.records import Island, RunFormat, TapeEvent
from diloco_cli.protocol.log.tape import Tape
from diloco_cli.tapes.needs import needs_of
from examples.quality.methods.fleets import play_fleet
from examples.quality.methods.pacing import Pacing, Spell, StepClock
from examples.quality.methods.schedules import (
    decoupled,
    failing,
    lockstep,
    make_tape,
    mixed_speeds,
    nearly_equal,
    spells_of,
    streaming,
    synchronous,
)

BATCH = 4


def make_run(sync: SyncSettings, pacings: tuple[Pacing, ...], batch: int = BATCH) -> RunFormat:
    settings = RunSettings(name="toy", sync=sync, train=TrainSettings(tokens=1, batch_tokens=batch))
    facts = [ParameterFact(f"w{i}", (3,), False) for i in range(sync.fragments)]
    islands = tuple(Island(f"l{i}", "here", batch, sync.every, 1.0, p.step_s) for i, p in enumerate(pacings))
    return RunFormat("id", "toy", "", settings, islands, make_layout(facts, sync), "test")


PACE_KNOWN = 7  # merges, at the latest


def tape_of(sync: SyncSettings, pacings: tuple[Pacing, ...], steps: int, batch: int = BATCH, quantum: int = 1) -> Tape:
    return make_tape(make_run(sync, pacings, batch), pacings, steps * batch * len(pacings), quantum)[0]


def participants(tape: Tape) -> list[str]:
    return ["".join(learner[1:] for (learner, _, _), _ in merge.inputs) for merge in tape.merges]


def mean_participants(tape: Tape) -> float:
    return sum(len(merge.inputs) for merge in tape.merges) / len(tape.merges)


def steps_of(events: tuple[TapeEvent, ...]) -> int:
    return sum(event.count for event in events if event.kind == "steps")


def test_synchronous_diloco_is_rounds_in_which_everybody_waits_for_everybody() -> None:
    """By hand: 6 steps, send, merge 1 of all three, adopt it; and again. Weight tokens^2 / steps = 24^2 / 6 = 96."""
    tape = tape_of(synchronous(SyncSettings(every=6), 3), lockstep(3), steps=12)
    for track in tape.tracks:
        kinds = [(e.kind, e.count or e.version or e.seq or e.n) for e in track.events]
        assert kinds == [
            ("steps", 6), ("sent", 0), ("heard", 1), ("adopted", 1), ("steps", 6), ("sent", 1),
        ]  # fmt: skip
    assert [(merge.n, merge.slot, merge.tokens) for merge in tape.merges] == [(1, 0, 72), (2, 1, 144)]
    assert tape.merges[0].inputs == tuple(((f"l{i}", 1, 0), 96.0) for i in range(3))
    assert tape.run.settings.train.tokens == 144


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_streaming_diloco_adopts_each_fragment_exactly_tau_slots_after_its_slot(overlap: int) -> None:
    sync = streaming(SyncSettings(every=6, fragments=3, overlap=overlap), 2)
    tape = tape_of(sync, lockstep(2), steps=24)
    assert participants(tape) == ["01"] * 12
    assert [merge.fragment for merge in tape.merges] == [0, 1, 2] * 4
    for track in tape.tracks:
        sends = 0
        for event in track.events:
            sends += event.kind == "sent"
            if event.kind == "adopted":  # version n is slot n - 1
                assert event.version == sends - overlap
    # A fragment counts what was trained since its adoption: the first round 2, 4 or 6 steps, later ones 6 - 2 tau.
    # Weights tokens^2 / steps = 16 x steps.
    weights = [merge.inputs[0][1] / 16 for merge in tape.merges]
    assert weights == [2.0, 4.0, 6.0] + [6.0 - 2 * overlap] * 9


def test_equal_learners_with_a_window_all_take_part_in_every_merge() -> None:
    sync = decoupled(SyncSettings(every=24, fragments=12, overlap="auto", quorum=1))
    tape = tape_of(sync, nearly_equal(4), steps=96)
    assert participants(tape) == ["0123"] * 48


def test_mixed_hardware_merges_together_at_the_pace_of_the_fastest_with_a_window_and_without() -> None:
    """Half the learners take 1.5 times as long, with one H for all. Quorum M waits for the slow; at K = 1 they offer
    what they have by then, in time for the slot's window, though it has no length: from when the log tells the pace,
    which the syncer has to see first."""
    pacings = mixed_speeds(4, slow=1.5)
    base = SyncSettings(every=24, fragments=12, overlap=2, local_steps="planned")
    steps = 144
    full = tape_of(decoupled(replace(base, quorum=4)), pacings, steps)
    no_window = tape_of(decoupled(replace(base, quorum=1, grace=GraceSettings(0.0))), pacings, steps)
    window = tape_of(decoupled(replace(base, quorum=1, grace=GraceSettings(0.5))), pacings, steps)
    assert mean_participants(full) == 4.0
    slots = max(steps_of(track.events) for track in no_window.tracks) * 12 // 24  # of the fastest learner
    for tape in (no_window, window):
        taking_part = [len(merge.inputs) for merge in tape.merges]
        assert fmean(taking_part[PACE_KNOWN:]) > 3.9 and min(taking_part) >= 2
        assert abs(len(tape.merges) - slots) <= 2
    assert len(full.merges) < 0.9 * slots


def test_with_error_feedback_each_offer_names_the_applied_one_whose_rounding_it_makes_good() -> None:
    sync = replace(streaming(SyncSettings(every=6, fragments=3, overlap=1), 2), codec="int4", error_feedback=True)
    for track in tape_of(sync, lockstep(2), steps=18).tracks:
        sent = [(event.seq, event.since) for event in track.events if event.kind == "sent"]
        assert sent == [(seq, None if seq < 3 else seq - 3) for seq in range(9)]


def test_failing_learners_lose_steps_and_slices_and_still_merge() -> None:
    pacings = failing(learners=4, chips=1_200_000, seed=3, horizon_steps=200)
    sync = decoupled(SyncSettings(every=24, fragments=12, overlap=2, quorum=1))
    tape = tape_of(sync, pacings, steps=200, batch=1024, quantum=64)
    batches = {event.batch_tokens for track in tape.tracks for event in track.events if event.kind == "steps"}
    assert 1024 in batches
    assert all(batch % 64 == 0 for batch in batches)
    assert min(batches) < 1024, "a learner that lost slices goes on with a smaller batch"
    assert 1.0 < mean_participants(tape) < 4.0
    needs_of(tape)  # it can be played


def test_the_spells_of_a_simulated_learner_hold_its_goodput() -> None:
    """Share x time over all spells is what the goodput simulator counts for the same learner."""
    learner = equal_learners(1_200_000, 4, PUBLISHED)[0]
    simulated = walk(learner, 3_600_000, generator(5, 0))
    spells = spells_of(simulated)
    ends_s = [*(spell.start_s for spell in spells[1:]), float(simulated.end_ms[-1]) / 1000]
    useful_s = sum(spell.share * (end_s - spell.start_s) for spell, end_s in zip(spells, ends_s, strict=True))
    assert useful_s / 3600 == pytest.approx(simulated.goodput, abs=1e-9)
    assert 0.6 < simulated.goodput < 0.95


def test_without_chips_nothing_fails() -> None:
    assert all(pacing.spells[-1].share == 1.0 and len(pacing.spells) <= 2 for pacing in failing(2, 0, 0, 100))


@pytest.mark.parametrize("mixing", ["replace", "rebase"])
def test_every_learner_reads_its_shard_in_order_and_all_stop_at_the_budget(mixing: str) -> None:
    sync = decoupled(SyncSettings(every=8, fragments=4, overlap=1, quorum=1, mixing=mixing))  # type: ignore[arg-type]
    pacings = mixed_speeds(3, slow=1.3)
    tape, processed = make_tape(make_run(sync, pacings), pacings, tokens=60 * BATCH * 3, quantum_tokens=1)
    assert processed == 60 * BATCH * 3
    for track in tape.tracks:
        assert [e.seq for e in track.events if e.kind == "sent"] == list(
            range(sum(e.kind == "sent" for e in track.events))
        )
    assert tape.run.settings.train.tokens == tape.merges[-1].tokens <= processed


def test_every_offer_gets_its_outcome() -> None:
    """Under failures some come too late: without an outcome each would block its fragment for its learner."""
    pacings = failing(8, 1_200_000, seed=0, horizon_steps=300)
    run = make_run(decoupled(SyncSettings(every=6, fragments=4)), pacings)
    fleet = play_fleet(run, pacings, 150 * BATCH * 8)
    assert fleet.state.metrics.offers_refused > 0
    for name in fleet.conditions:
        offered = len(fleet.world.store.list(f"offer/{name}/", limit=100_000))
        known = fleet.state.learner(name)
        assert offered - 2 <= known.next_seq <= offered, "at most what is in flight at the end has none"
        assert known.merges + known.refused == known.next_seq + len(known.settled)


def test_a_learner_of_which_a_part_is_gone_says_so_and_is_merged_all_the_same() -> None:
    """Half of its slices are away from 20 s to 60 s: its offers state half of the tokens, and weigh less."""
    pacings = (Pacing(1.0, 0.3, 0.3), Pacing(1.0, 0.3, 0.3, (Spell(0.0, 1.0), Spell(20.0, 0.5), Spell(60.0, 1.0))))
    tape = tape_of(decoupled(SyncSettings(every=8, fragments=4, overlap=1)), pacings, steps=80, batch=8)
    batches = {event.batch_tokens for event in tape.tracks[1].events if event.kind == "steps"}
    assert batches == {4, 8} and participants(tape).count("01") >= 0.95 * len(tape.merges)
    weights = [{learner: weight for (learner, _, _), weight in merge.inputs} for merge in tape.merges[12:26]]
    assert all(weight["l1"] < weight["l0"] for weight in weights)


def test_a_fleet_that_cannot_go_on_says_so() -> None:
    """Two are needed, and one of them leaves for good after 20 steps."""
    pacings = (Pacing(1.0, 0.5, 0.5), Pacing(1.0, 0.5, 0.5, spells=(Spell(0.0, 1.0), Spell(20.0, 0.0))))
    sync = replace(decoupled(SyncSettings(every=6, fragments=3)), quorum=2)
    with pytest.raises(RunFailedError, match="nobody can go on"):
        tape_of(sync, pacings, steps=400)


def test_adaptive_mixing_needs_deltas_that_nobody_has_here() -> None:
    sync = decoupled(SyncSettings(every=8, fragments=4, mixing="adaptive"))
    with pytest.raises(UsageError, match="adaptive"):
        tape_of(sync, nearly_equal(2), steps=8)


def test_the_same_arguments_give_the_same_tape() -> None:
    sync = decoupled(SyncSettings(every=24, fragments=12, overlap="auto", quorum=1))
    first, second = (tape_of(sync, failing(2, 1_200_000, 7, 100), 100, 512, 64) for _ in range(2))
    assert first == second
    assert first != tape_of(sync, failing(2, 1_200_000, 8, 100), 100, 512, 64)


# -- a learner's clock ------------------------------------------------------------------------------------------------


def ends(pacing: Pacing, count: int, batch: int = 8, quantum: int = 1) -> list[tuple[float, int]]:
    clock, now_s, found = StepClock(pacing, quantum), 0.0, []
    for _ in range(count):
        step = clock.next_step(now_s, batch)
        if step is None:
            break
        found.append((step.end_s, step.batch_tokens))
        now_s = step.end_s
    return found


def test_a_step_that_an_outage_interrupts_starts_anew_after_it() -> None:
    """Down from 2.5 to 7: the step begun at 2 is lost. Half the slices from 7 on."""
    pacing = Pacing(1.0, spells=(Spell(0.0, 1.0), Spell(2.5, 0.0), Spell(7.0, 0.5)))
    assert ends(pacing, 4) == [(1.0, 8), (2.0, 8), (8.0, 4), (9.0, 4)]


def test_a_learner_that_never_comes_back_makes_no_further_step() -> None:
    assert ends(Pacing(1.0, spells=(Spell(0.0, 1.0), Spell(2.0, 0.0))), 4) == [(1.0, 8), (2.0, 8)]


def test_what_rounding_a_batch_leaves_over_goes_to_later_steps() -> None:
    """Three quarters of 8 are 6; in whole multiples of 4 that is 4, 8, 4, 8: 6 on average."""
    pacing = Pacing(1.0, spells=(Spell(0.0, 0.75),))
    assert [batch for _, batch in ends(pacing, 4, quantum=4)] == [4, 8, 4, 8]
