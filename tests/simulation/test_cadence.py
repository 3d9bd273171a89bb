"""Slots go at the pace of most learners, and what is trained is merged: the syncer's and the learners' decisions
together, in virtual time. No torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import ColdStartSettings, GraceSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import Island, Offer, decode
from examples.quality.methods.fleets import play_fleet
from examples.quality.methods.pacing import Pacing, Spell
from tests.simulation.toy import run_of

BATCH, STEP_S, SLOT_S, LINK_S = 64, 1.0, 2.0, 0.3
NEAR = Pacing(STEP_S, LINK_S, LINK_S)


class Played:
    """A fleet after its run. `due`: slots that its fastest learner's steps reached."""

    def __init__(
        self, pacings: list[Pacing], fragments: int = 4, steps_a_slot: int = 2, rounds: int = 40,
        cold_start: ColdStartSettings = ColdStartSettings(), **sync: Any,
    ) -> None:  # fmt: skip
        every = steps_a_slot * fragments
        settings = RunSettings(
            name="cadence",
            cold_start=cold_start,
            train=TrainSettings(tokens=1, batch_tokens=BATCH),
            sync=replace(SyncSettings(every=every, fragments=fragments), **sync),
        )
        islands = (Island(f"l{i}", "here", BATCH, every, 0.0, p.step_s) for i, p in enumerate(pacings))
        run = run_of(settings, islands, elements=10)
        self.fleet = play_fleet(run, tuple(pacings), rounds * every * BATCH * len(pacings))
        self.state, self.num_learners = self.fleet.state, len(pacings)
        self.due = self.reached("l0")
        for steps in self.fleet.steps.values():
            self.due = max(self.due, steps // steps_a_slot)

    def reached(self, name: str) -> int:
        """Slots that a learner's steps reached."""
        return self.fleet.steps[name] * self.fleet.run.num_fragments // self.fleet.run.settings.sync.every

    def commits(self) -> list[Commit]:
        store = self.fleet.world.store
        return [decode(Commit, store.get(commit_key(n)) or b"", "log") for n in range(self.state.n + 1)]

    def merges(self) -> list[Commit]:
        return [commit for commit in self.commits() if commit.kind == "merge"]

    def offers(self) -> list[Offer]:
        store = self.fleet.world.store
        keys = store.list("offer/", limit=1_000_000)
        return [decode(Offer, store.get(key) or b"", key) for key in keys]

    def refused(self) -> Counter[str]:
        return Counter(outcome.reason for commit in self.commits() for outcome in commit.outcomes)

    @property
    def kept(self) -> float:
        """Merged tokens / processed ones."""
        return self.state.tokens(self.fleet.run.layout) / self.fleet.processed


@pytest.mark.parametrize("gamma", [pytest.param(0.0, marks=pytest.mark.long), 0.5])
@pytest.mark.parametrize(
    "slow_link_s", [2.5, *(pytest.param(link_s, marks=pytest.mark.long) for link_s in (LINK_S, 1.2, 3.0))]
)
def test_equal_learners_merge_once_a_slot_whatever_their_links(slow_link_s: float, gamma: float) -> None:
    """Whoever's offers take longer than a slot cannot be in every merge, and does not hold the others up."""
    pacings = [NEAR, NEAR, replace(NEAR, upload_s=1.2), replace(NEAR, upload_s=slow_link_s)]
    played = Played(pacings, grace=GraceSettings(gamma))
    assert played.state.metrics.skips == 0
    assert played.state.merges == pytest.approx(played.due, abs=4)
    assert played.state.participation > (0.95 if slow_link_s < SLOT_S else 0.85)


@pytest.mark.parametrize(
    "apart", [0.1, *(pytest.param(share, marks=pytest.mark.long) for share in (0.0, 0.002, 0.01, 0.03))]
)
@pytest.mark.parametrize("mixing", ["replace", "rebase"])
def test_learners_that_are_a_little_apart_merge_together(apart: float, mixing: str) -> None:
    """Four, the slowest by so much slower than the fastest, H as planned: nobody falls out of step, the pace is that of
    the slower one in the middle, at most one offer is late, and with `rebase` nothing of what is processed is lost."""
    pacings = [Pacing(STEP_S * (1 + apart * index / 3), LINK_S, LINK_S) for index in range(4)]
    played = Played(pacings, rounds=60, mixing=mixing, local_steps="planned")
    assert played.state.participation > 0.98 and played.state.metrics.skips == 0
    assert played.state.metrics.offers_refused <= 1
    assert (0.98 - apart / 3) * played.due <= played.state.merges <= played.due + 4
    assert played.kept > (0.98 if mixing == "rebase" else 0.6)


@pytest.mark.parametrize(
    ("fragments", "mixing"),
    [(4, "rebase"), *(pytest.param(12, mixing, marks=pytest.mark.long) for mixing in ("rebase", "replace"))],
)
def test_after_an_outage_with_a_full_quorum_little_is_given_up(fragments: int, mixing: str) -> None:
    """One of four is away for 140 s; the others stand at their bound, and are then ahead of it. Their offers must not
    lie there for rounds: nearly as much of what is processed gets merged as without the outage."""
    away = replace(NEAR, spells=(Spell(0.0, 1.0), Spell(60.0, 0.0), Spell(200.0, 1.0)))
    undisturbed = Played([NEAR] * 4, quorum=4, mixing=mixing)
    played = Played([NEAR, NEAR, NEAR, away], fragments=fragments, rounds=160 // fragments, quorum=4, mixing=mixing)
    assert played.state.metrics.skips <= 3, "a slot that nobody can fill is skipped each minute"
    assert played.kept > 0.9 * undisturbed.kept
    assert max(offer.slot for offer in played.offers()) - played.state.slot <= fragments


def test_a_link_that_is_too_slow_for_the_cadence_merges_as_often_as_it_carries() -> None:
    """One payload takes 7 s, a slot 2 s: what comes is merged, both learners' together, and `rebase` keeps what they
    trained meanwhile for the offers that do get through."""
    played = Played([Pacing(STEP_S, 7.0, 7.0)] * 2, fragments=12, rounds=40, mixing="rebase")
    assert played.state.merges >= 0.9 * played.due * SLOT_S / 7.0
    assert played.state.participation > 0.95 and played.kept > 0.9
    assert played.state.metrics.offers_refused <= 0.04 * len(played.offers())


# -- the first rounds -------------------------------------------------------------------------------------------


def test_where_one_begins_alone_the_others_come_with_the_round_after() -> None:
    played = Played([NEAR] * 3, rounds=12, cold_start=ColdStartSettings(rounds=4))
    inputs = [len(commit.inputs) for commit in played.merges()]
    assert inputs[:16] == [1] * 16 and set(inputs[19:-1]) == {3}
    assert {item.learner for commit in played.merges()[:16] for item in commit.inputs} == {"l0"}
