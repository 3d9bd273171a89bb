"""Any schedule in virtual time: who sends what after which step, who waits for whom, and what the grace window buys."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.protocol.log.records import RunFormat
from tests.simulation.sweeps import finished
from tests.simulation.toy import BATCH_TOKENS, STEP_S, LearnerProfile, ToyFleet, make_run


def with_schedule(every: int, fragments: int, learners: int, rounds: int = 4, **sync: object) -> RunFormat:
    run = make_run(learners=learners, fragments=fragments, **sync)
    tokens = rounds * every * learners * BATCH_TOKENS
    settings_ = replace(
        run.settings, sync=replace(run.settings.sync, every=every), train=replace(run.settings.train, tokens=tokens)
    )
    islands = tuple(replace(island, local_steps=every) for island in run.islands)
    return replace(run, settings=settings_, islands=islands)


def sent_after(fleet: ToyFleet, name: str) -> dict[int, int]:
    """slot -> own steps made when it was offered."""
    offers = [json.loads(data) for (learner, _, _), data in sorted(fleet.published.offers.items()) if learner == name]
    return {offer["slot"]: offer["data_end"] // BATCH_TOKENS for offer in offers}


@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 3))
def test_every_fragment_is_due_once_a_round_on_its_own_offset(every: int, fragments: int, learners: int) -> None:
    """H divisible by P or not, H < P: slot k is offered after step ceil((k + 1) H / P) by whoever was never behind, or
    one step later, where the windows have followed learners that came at the end of a step."""
    fleet = ToyFleet(with_schedule(every, fragments, learners, quorum=learners, local_steps="planned")).start()
    kinds = finished(fleet, 120).kinds
    assert kinds.count("merge") >= 3 * fragments and "skip" not in kinds
    for island in fleet.run.islands:
        steps = sent_after(fleet, island.name)
        assert sorted(steps) == list(range(len(steps))), "a slot was left out"
        if every > fragments:  # else an exchange takes longer than a slot: of one fragment it is waited for
            late = {slot: done - -(-(slot + 1) * every // fragments) for slot, done in steps.items()}
            assert set(late.values()) <= {0, 1} and sum(late.values()) <= len(late) / 8, late


@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(2, 9), st.integers(2, 5), st.sampled_from(["replace", "rebase"]), st.floats(0.0, 0.6))
def test_several_fragments_in_flight_merge_and_add_up(every: int, fragments: int, mixing: str, late_s: float) -> None:
    """A syncer that comes late finds several fragments' offers waiting; the books of both sides still agree."""
    fleet = ToyFleet(with_schedule(every, fragments, 2, rounds=6, mixing=mixing, quorum=2))
    fleet.syncer()
    fleet.until_commits(1)
    (syncer,) = fleet.living("syncer")
    fleet.start_learners()
    fleet.world.run(lambda: len(fleet.published.offers) >= 2, 30)
    syncer.paused = True
    fleet.world.run_for(late_s)
    fleet.world.resume(syncer)
    found = finished(fleet, 120)
    merged: dict[int, int] = defaultdict(int)
    for record in fleet.records():
        if record["kind"] == "merge":
            merged[record["outputs"][0]["fragment"]] += 1
    assert found.tokens >= fleet.run.settings.train.tokens
    assert max(merged.values()) - min(merged.values()) <= 1, "one fragment was merged more often than another"


# -- nobody waits for somebody who is not there ------------------------------------------------------------------


@pytest.mark.parametrize("dies_at", [9, 16, 23])
def test_a_recovered_learner_works_from_the_same_versions_as_one_that_never_failed(dies_at: int) -> None:
    """Within one cycle of its first offer: for each slot, both learners' deltas are made from the same version."""
    fleet = ToyFleet(with_schedule(6, 3, 2, rounds=14, quorum=1)).start().until_commits(dies_at)
    fleet.restart = False  # or a second successor would come, and fence this one
    fleet.kill("l0")
    fleet.learner("l0", delay_s=0.05)
    finished(fleet, 120)
    bases: dict[str, dict[int, int]] = {"l0": {}, "l1": {}}
    for (name, incarnation, _), data in fleet.published.offers.items():
        offer = json.loads(data)
        if (name, incarnation) != ("l0", 1):
            bases[name][offer["slot"]] = offer["base"]
    back = min(bases["l0"]) + fleet.run.num_fragments
    common = [slot for slot in bases["l0"] if slot >= back and slot in bases["l1"]]
    assert len(common) >= 9
    assert [bases["l0"][slot] for slot in common] == [bases["l1"][slot] for slot in common]


# -- quorum, grace and mixed hardware -----------------------------------------------------------------------------


def participants(start: Callable[[ToyFleet], object], **sync: object) -> tuple[float, float]:
    """Mean participants of a merge, and slots per own step of a learner x H / P (1: in step with the learners)."""
    fleet = ToyFleet(with_schedule(6, 3, 3, rounds=25, **sync))
    fleet.syncer()
    start(fleet)
    finished(fleet, 200)
    merges = [len(record["inputs"]) for record in fleet.records() if record["kind"] == "merge"]
    steps = max(json.loads(data)["data_end"] for data in fleet.published.offers.values()) // BATCH_TOKENS
    return sum(merges) / len(merges), len(merges) / steps * 6 / 3


def out_of_step(fleet: ToyFleet) -> None:
    """Three equal learners that reach their slots 0.03 s apart; a slot lasts 0.1 s."""
    for index, island in enumerate(fleet.run.islands):
        fleet.learner(island.name, delay_s=0.03 * index)


def test_a_quorum_of_one_is_as_good_as_a_full_quorum_and_goes_on_as_fast() -> None:
    full, full_pace = participants(out_of_step, quorum=3)
    windowed, windowed_pace = participants(out_of_step, quorum=1, overlap="auto")
    bare, bare_pace = participants(out_of_step, quorum=1, overlap=0)  # no overlap, no slack, no grace
    assert full == 3.0 and min(windowed, bare) >= 0.95 * full
    assert windowed_pace == pytest.approx(full_pace, rel=0.1) and bare_pace == pytest.approx(full_pace, rel=0.1)


def test_the_pace_of_the_slots_is_that_of_the_fastest_participant() -> None:
    """One learner three times slower than the other, and both merge: a slot is 2 steps of the faster one."""
    fleet = ToyFleet(with_schedule(6, 3, 2, rounds=20, local_steps="planned"))
    fleet.profile["l1"] = LearnerProfile(3 * STEP_S)
    fleet.start().finish(200)
    merges = [record for record in fleet.records() if record["kind"] == "merge"]
    assert sum(len(record["inputs"]) == 2 for record in merges) >= 5
    assert fleet.served.pace.slot_s == pytest.approx(2 * STEP_S, rel=0.05)
