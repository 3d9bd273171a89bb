"""A link that was slow for a while, or a learner that was away: the merges have it again as soon as they can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.protocol.actors.progress import Progress
from tests.histories.history import History
from tests.histories.liveness import Healthy
from tests.histories.options import Options, drawn_options
from tests.histories.outcome import Actors
from tests.histories.replayer import ViolationError, in_one
from tests.histories.script import NemesisEvent, Script
from tests.simulation.mutant_learners import NeverTriesAgain, PassesByWhatIsInReach, with_progress

SEED = 3
# Fragments, and what an upload takes, as a share of the longest time after which an offer can be of use: too much for
# all slots that a learner may name.
SLOW = [(1, 1.2), (1, 1.5), (2, 0.8), (2, 1.5), (3, 0.8), (3, 1.2)]


def two_learners(fragments: int) -> Options:
    """A run that goes on without a learner whose link is slow."""
    return replace(
        drawn_options(SEED).without_faults(), learners=2, apart=0, quorum=1, syncers=1, fragments=fragments, merges=100,
        mixing="rebase", adoption="on_arrival", overlap="auto", local_steps="measured", staleness_rounds=1,
        slowest=1.0, latency_s=0.001, step_s=0.1, steps_a_slot=2, faulty_share=0.4, cold_rounds=0,
    )  # fmt: skip


def after_a_slow_link(
    fragments: int, transfer: float, progress: type[Progress]
) -> tuple[Healthy, ViolationError | None]:
    options = two_learners(fragments)
    slow = NemesisEvent(0.01, "slow_link", "l1", transfer * options.reach_s)
    history = History(SEED, options, Script((), (slow,)), Actors(learner=with_progress(progress)))
    violation = history.live().violation
    assert history.healthy is not None
    return history.healthy, violation


@pytest.mark.parametrize(("fragments", "transfer"), SLOW)
def test_its_learner_takes_part_again(fragments: int, transfer: float) -> None:
    healthy, violation = after_a_slow_link(fragments, transfer, Progress)
    assert violation is None
    mine = healthy.attendances.known["l1.1"]
    assert mine.took_part > 0.5 * mine.merges > 0


def test_one_that_offers_for_no_slot_out_of_reach_is_in_no_merge_again_and_that_is_noticed() -> None:
    """Not on each link: where the uploads of several fragments go on together, some of them are still in reach."""
    found = [after_a_slow_link(fragments, transfer, NeverTriesAgain)[1] for fragments, transfer in SLOW]
    assert {violation.invariant for violation in found if violation is not None} == {"liveness"}


def missed_in_a_pause(slots: float, progress: type[Progress]) -> int:
    """So many merges are without the learner that was frozen for so many slots."""
    options = replace(two_learners(4), steps_a_slot=8)
    pause = NemesisEvent(10.0, "pause", "l1", slots * options.slot_s)
    outcome = History(SEED, options, Script((), (pause,)), Actors(learner=with_progress(progress))).live()
    assert outcome.violation is None
    merges = [commit for commit in map(in_one, outcome.log) if commit["kind"] == "merge"]
    return sum(all(offer["learner"] != "l1" for offer in merge["inputs"]) for merge in merges)


@pytest.mark.parametrize("slots", [18, 25])
def test_a_frozen_learner_misses_no_merge_after_it_has_woken(slots: int) -> None:
    assert missed_in_a_pause(slots, Progress) <= slots < missed_in_a_pause(slots, PassesByWhatIsInReach)
