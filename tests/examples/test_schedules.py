"""Fleets in virtual time: who merges what when, by hand and by property. No torch."""

from __future__ import annotations

from statistics import fmean

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import GraceSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.errors import RunFailedError
from diloco_cli.forecast.chips import equal_learners, generator
from diloco_cli.forecast.goodput import PUBLISHED
from diloco_cli.layout import ParameterFact, make_layout
from diloco_cli.protocol.log.records import Island, Offer, RunFormat, decode
from examples.quality.methods.fleets import PacedFleet, play_fleet
from examples.quality.methods.pacing import Pacing, Spell, StepClock
from examples.quality.methods.schedules import (
    decoupled,
    failing,
    lockstep,
    mixed_speeds,
    nearly_equal,
    spells_of,
    streaming,
    synchronous,
)
from examples.quality.methods.walking import walk

BATCH = 4


def make_run(sync: SyncSettings, pacings: tuple[Pacing, ...], batch: int = BATCH) -> RunFormat:
    settings = RunSettings(name="toy", sync=sync, train=TrainSettings(tokens=1, batch_tokens=batch))
    facts = [ParameterFact(f"w{i}", (3,), False) for i in range(sync.fragments)]
    islands = tuple(Island(f"l{i}", "here", batch, sync.every, 1.0, p.step_s) for i, p in enumerate(pacings))
    return RunFormat("id", "toy", "", settings, islands, make_layout(facts, sync), "test")


PACE_KNOWN = 7  # merges, at the latest


def play(
    sync: SyncSettings, pacings: tuple[Pacing, ...], steps: int, batch: int = BATCH, quantum: int = 1
) -> PacedFleet:  # fmt: skip
    return play_fleet(make_run(sync, pacings, batch), pacings, steps * batch * len(pacings), quantum)


def participants(fleet: PacedFleet) -> list[str]:
    return ["".join(item.learner[1:] for item in merge.inputs) for merge in fleet.merges]


def mean_participants(fleet: PacedFleet) -> float:
    return fmean(len(merge.inputs) for merge in fleet.merges)


def offers(fleet: PacedFleet, name: str) -> list[Offer]:
    """All of one learner, in their order."""
    store = fleet.world.store
    found = [decode(Offer, store.get(key) or b"", key) for key in store.list(f"offer/{name}/", limit=100_000)]
    return sorted(found, key=lambda offer: offer.seq)


def test_synchronous_diloco_is_rounds_in_which_everybody_waits_for_everybody() -> None:
    """By hand: 6 steps, merge of all three, 6 steps from it, merge. Weight tokens^2 / steps = 24^2 / 6 = 96."""
    fleet = play(synchronous(SyncSettings(every=6), 3), lockstep(3), steps=12)
    assert dict(fleet.steps) == {f"l{i}": 12 for i in range(3)}
    merges = fleet.merges
    assert [[(i.learner, i.seq, i.base, i.weight) for i in merge.inputs] for merge in merges] == [
        [(f"l{i}", seq, seq, 96.0) for i in range(3)] for seq in range(2)
    ]
    assert fleet.state.tokens(fleet.run.layout) == 144


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_streaming_diloco_adopts_each_fragment_exactly_tau_slots_after_its_slot(overlap: int) -> None:
    """A fragment counts what was trained since its adoption: the first round 2, 4 or 6 steps, later ones 6 - 2 tau.
    Weights tokens^2 / steps = 16 x steps."""
    fleet = play(streaming(SyncSettings(every=6, fragments=3, overlap=overlap), 2), lockstep(2), steps=24)
    assert participants(fleet) == ["01"] * 12
    assert [merge.outputs[0].fragment for merge in fleet.merges] == [0, 1, 2] * 4
    weights = [merge.inputs[0].weight / 16 for merge in fleet.merges]
    assert weights == [2.0, 4.0, 6.0] + [6.0 - 2 * overlap] * 9


def test_equal_learners_with_a_window_all_take_part_in_every_merge() -> None:
    sync = decoupled(SyncSettings(every=24, fragments=12, overlap="auto", quorum=1))
    fleet = play(sync, nearly_equal(4), steps=96)
    assert participants(fleet) == ["0123"] * 48


def test_mixed_hardware_merges_together_at_the_pace_of_the_fastest_with_a_window_and_without() -> None:
    """Half the learners take 1.5 times as long, with one H for all. Quorum M waits for the slow; at K = 1 they offer
    what they have by then, in time for the slot's window, though it has no length: from when the log tells the pace,
    which the syncer has to see first."""
    pacings = mixed_speeds(4, slow=1.5)
    base = SyncSettings(every=24, fragments=12, overlap=2, local_steps="planned")
    steps = 144
    full = play(decoupled(replace(base, quorum=4)), pacings, steps)
    no_window = play(decoupled(replace(base, quorum=1, grace=GraceSettings(0.0))), pacings, steps)
    window = play(decoupled(replace(base, quorum=1, grace=GraceSettings(0.5))), pacings, steps)
    assert mean_participants(full) == 4.0
    slots = max(no_window.steps.values()) * 12 // 24  # of the fastest learner
    for fleet in (no_window, window):
        taking_part = [len(merge.inputs) for merge in fleet.merges]
        assert fmean(taking_part[PACE_KNOWN:]) > 3.9 and min(taking_part) >= 2
        assert abs(len(fleet.merges) - slots) <= 2
    assert len(full.merges) < 0.9 * slots


def test_with_error_feedback_each_offer_names_the_applied_one_whose_rounding_it_makes_good() -> None:
    sync = replace(streaming(SyncSettings(every=6, fragments=3, overlap=1), 2), codec="int4", error_feedback=True)
    fleet = play(sync, lockstep(2), steps=18)
    for name in fleet.pacings:
        sent = [(offer.seq, offer.feeds_back) for offer in offers(fleet, name)]
        assert sent == [(seq, None if seq < 3 else seq - 3) for seq in range(9)]


def test_failing_learners_lose_steps_and_slices_and_still_merge() -> None:
    pacings = failing(learners=4, chips=1_200_000, seed=3, horizon_steps=200)
    sync = decoupled(SyncSettings(every=24, fragments=12, overlap=2, quorum=1))
    fleet = play(sync, pacings, steps=200, batch=1024, quantum=64)
    made = [offer for name in fleet.pacings for offer in offers(fleet, name)]
    assert all(offer.tokens % 64 == 0 for offer in made)
    assert any(offer.tokens == 1024 * offer.steps for offer in made)
    assert any(offer.tokens < 1024 * offer.steps for offer in made), "one that lost slices takes smaller batches"
    assert 1.0 < mean_participants(fleet) < 4.0


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
    fleet = play(sync, mixed_speeds(3, slow=1.3), steps=60)
    assert fleet.processed == 60 * BATCH * 3 >= fleet.state.tokens(fleet.run.layout)
    for name in fleet.pacings:
        made = offers(fleet, name)
        assert [offer.seq for offer in made] == list(range(len(made)))
        assert all(offer.data_end <= fleet.tokens[name] for offer in made)


def test_every_offer_gets_its_outcome() -> None:
    """Under failures some come too late: without an outcome each would block its fragment for its learner."""
    pacings = failing(8, 1_200_000, seed=0, horizon_steps=300)
    run = make_run(decoupled(SyncSettings(every=6, fragments=4)), pacings)
    fleet = play_fleet(run, pacings, 150 * BATCH * 8)
    assert fleet.state.metrics.offers_refused > 0
    for name in fleet.pacings:
        offered = len(offers(fleet, name))
        known = fleet.state.learner(name)
        assert offered - 2 <= known.next_seq <= offered, "at most what is in flight at the end has none"
        assert known.merges + known.refused == known.next_seq + len(known.settled)


def test_a_learner_of_which_a_part_is_gone_says_so_and_is_merged_all_the_same() -> None:
    """Half of its slices are away from 20 s to 60 s: its offers state half of the tokens, and weigh less."""
    pacings = (Pacing(1.0, 0.3, 0.3), Pacing(1.0, 0.3, 0.3, (Spell(0.0, 1.0), Spell(20.0, 0.5), Spell(60.0, 1.0))))
    fleet = play(decoupled(SyncSettings(every=8, fragments=4, overlap=1)), pacings, steps=80, batch=8)
    assert {offer.tokens / offer.steps for offer in offers(fleet, "l1")} >= {4.0, 8.0}
    assert participants(fleet).count("01") >= 0.95 * len(fleet.merges)
    weights = [{item.learner: item.weight for item in merge.inputs} for merge in fleet.merges[12:26]]
    assert all(weight["l1"] < weight["l0"] for weight in weights)


def test_a_fleet_that_cannot_go_on_says_so() -> None:
    """Two are needed, and one of them leaves for good after 20 steps."""
    pacings = (Pacing(1.0, 0.5, 0.5), Pacing(1.0, 0.5, 0.5, spells=(Spell(0.0, 1.0), Spell(20.0, 0.0))))
    sync = replace(decoupled(SyncSettings(every=6, fragments=3)), quorum=2)
    with pytest.raises(RunFailedError, match="nobody can go on"):
        play(sync, pacings, steps=400)


def test_the_same_arguments_give_the_same_bucket() -> None:
    sync = decoupled(SyncSettings(every=24, fragments=12, overlap="auto", quorum=1))
    first, second, other = (play(sync, failing(2, 1_200_000, seed, 100), 100, 512, 64).log for seed in (7, 7, 8))
    assert first == second != other


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
