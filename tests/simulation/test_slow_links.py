"""A link that was slow for a while: when it is fast again, its learner is in the merges again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.histories.history import History
from diloco_cli.histories.liveness import Healthy
from diloco_cli.histories.options import Options, drawn_options
from diloco_cli.histories.outcome import Actors
from diloco_cli.histories.replayer import ViolationError
from diloco_cli.histories.script import NemesisEvent, Script
from diloco_cli.protocol.actors.progress import Progress
from tests.simulation.mutant_learners import NeverTriesAgain, with_progress

SEED = 3
TRANSFERS = (0.8, 1.5)  # of the longest time after which an offer can be of use


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


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_its_learner_takes_part_again(fragments: int, transfer: float) -> None:
    healthy, violation = after_a_slow_link(fragments, transfer, Progress)
    assert violation is None
    mine = healthy.attendances.known["l1.1"]
    assert mine.took_part > 0.5 * mine.merges > 0


def test_one_that_offers_for_no_slot_out_of_reach_is_in_no_merge_again_and_that_is_noticed() -> None:
    _, violation = after_a_slow_link(2, TRANSFERS[1], NeverTriesAgain)
    assert violation is not None and violation.invariant == "liveness"
