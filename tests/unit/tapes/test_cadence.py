"""Slots go at the pace of the fastest learner, and what is trained is merged: the syncer's and the learners' decisions
together, in virtual time. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.config.settings import GraceSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.records import Island, RunFormat
from diloco_cli.tapes.fleet import Fleet
from diloco_cli.tapes.pacing import Pacing, Spell

BATCH, STEP_S, LINK_S = 64, 1.0, 0.3
NEAR = Pacing(STEP_S, LINK_S, LINK_S)


def played(
    pacings: list[Pacing], fragments: int = 4, steps_a_slot: int = 2, rounds: int = 40, **sync: Any
) -> tuple[Fleet, int]:
    """(the fleet after its run, slots that its fastest learner reached)."""
    every = steps_a_slot * fragments
    settings = RunSettings(
        name="cadence",
        train=TrainSettings(tokens=1, batch_tokens=BATCH),
        sync=replace(SyncSettings(every=every, fragments=fragments), **sync),
    )
    islands = tuple(Island(f"l{i}", "here", BATCH, every, 0.0, p.step_s) for i, p in enumerate(pacings))
    layout = balanced_layout([ParameterFact(f"w{i}", (10,), False) for i in range(fragments)], fragments)
    run = RunFormat("id", "cadence", "2026-01-01T00:00:00.000Z", settings, islands, layout, "test")
    fleet = Fleet(run, tuple(pacings), rounds * every * BATCH * len(pacings))
    fleet.make_tape()
    return fleet, max(learner.progress.slots_reached for learner in fleet.learners)


def kept(fleet: Fleet) -> float:
    """Merged tokens / processed ones."""
    return fleet.syncer.state.tokens(fleet.run.layout) / fleet.processed


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("slow_link_s", [LINK_S, 1.2, 2.5, 3.0])
def test_equal_learners_merge_once_a_slot_whatever_their_links(slow_link_s: float, gamma: float) -> None:
    """An offer over a slow link misses its slot: it lies there, and must not carry the next one alone."""
    pacings = [NEAR, NEAR, replace(NEAR, upload_s=1.2), replace(NEAR, upload_s=slow_link_s)]
    fleet, due = played(pacings, grace=GraceSettings(gamma))
    assert fleet.syncer.state.skips == 0
    assert due <= fleet.syncer.state.merges <= due + 1


def test_late_offers_are_merged_with_those_in_time_instead_of_before_them() -> None:
    """A link of a slot and a quarter: every second offer of this learner is in a merge, always with the others."""
    fleet, _ = played([NEAR, NEAR, NEAR, replace(NEAR, upload_s=2.5)])
    participants = [len(merge.inputs) for merge in fleet.syncer.merges]
    assert min(participants) >= 3 and participants.count(4) > 0.4 * len(participants)


def test_a_slow_learner_that_is_left_alone_goes_on_at_its_own_pace() -> None:
    """The fast one is gone for good at 40 s. From then on the slow one, whose last offers came late, merges alone, once
    for each of its own slots of 3 s: nothing waits for who is gone, beyond the bound for being alive."""
    gone = replace(NEAR, spells=(Spell(0.0, 1.0), Spell(40.0, 0.0)))
    fleet, _ = played([gone, Pacing(1.5, LINK_S, LINK_S)], rounds=10, local_steps="planned")
    last = fleet.learners[1].progress
    assert fleet.syncer.state.skips == 0
    alone = [merge for merge in fleet.syncer.merges if [name for (name, _, _), _ in merge.inputs] == ["l1"]]
    assert len(alone) >= 0.9 * (last.slots_reached - 40 / 3)


def test_after_an_outage_with_a_full_quorum_little_is_given_up() -> None:
    """One of four is away for 140 s; the others stand at their bound, and are then ahead of it. Their offers must not
    lie there for rounds: nearly as much of what is processed gets merged as without the outage."""
    away = replace(NEAR, spells=(Spell(0.0, 1.0), Spell(60.0, 0.0), Spell(200.0, 1.0)))
    undisturbed, _ = played([NEAR] * 4, quorum=4)
    for fragments in (4, 12):
        fleet, _ = played([NEAR, NEAR, NEAR, away], fragments=fragments, rounds=160 // fragments, quorum=4)
        assert fleet.syncer.state.skips <= 3, "a slot that nobody can fill is skipped each minute"
        assert kept(fleet) > 0.9 * kept(undisturbed)
        lead = max(learner.progress.next_slot - fleet.syncer.state.slot for learner in fleet.learners)
        assert lead <= fragments


def test_a_full_quorum_of_unequal_speeds_leaves_no_offer_waiting_for_rounds() -> None:
    """Step times 1 to 2 s with one H for all: the slowest sets the pace, and nobody's offers are superseded."""
    fleet, _ = played([Pacing(s, LINK_S, LINK_S) for s in (1.0, 1.3, 1.7, 2.0)], quorum=4, local_steps="planned")
    state = fleet.syncer.state
    assert state.participation == 1.0 and state.skips == 0
    assert state.offers_refused == 0
    slowest = min(learner.progress.slots_reached for learner in fleet.learners)
    assert state.merges == pytest.approx(slowest, abs=4)


def test_links_that_take_several_slots_are_no_reason_to_hold_back() -> None:
    """7 s up and 7 s down at slots of 2 s: eight slots in flight, each merged."""
    fleet, due = played([Pacing(STEP_S, 7.0, 7.0)] * 2, fragments=12, rounds=14)
    assert fleet.syncer.state.merges == due and fleet.syncer.state.offers_refused == 0
