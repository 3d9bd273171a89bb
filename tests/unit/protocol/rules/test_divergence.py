"""When a loss has jumped, and what follows: from what the log says alone."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import EvaluationSettings
from diloco_cli.protocol.log.health import Evaluated, Stability
from diloco_cli.protocol.log.metrics import Metrics, Note
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.divergence import (
    concern,
    jump_of,
    limit_of,
    needed_from,
    overdue_after,
    response_to,
)
from tests.unit.protocol.records import RUN

SETTINGS = EvaluationSettings()


def losses(*values: float) -> tuple[Evaluated, ...]:
    return tuple(Evaluated(10 * at, loss, 100 * at) for at, loss in enumerate(values, start=1))


def state(**stability: Any) -> RunState:
    return RunState(n=60, stability=Stability(**stability))


@pytest.mark.parametrize(
    ("good", "loss"),
    [
        ((), 9.0),  # nothing to compare with
        ((2.0,), 2.24),  # within 0.25 nats
        ((8.0,), 8.7),  # within 10 %
        ((6.0, 4.5, 3.2, 3.0, 2.8), 3.8),  # early: losses change by 0.75 from one to the next
        ((3.0, 3.2, 2.9, 3.15, 3.0), 3.5),  # a short held-out set is noisy
        ((0.7, 0.6, 0.7, 0.6, 1.2), 1.2),  # after a rollback the newest good one comes back
    ],
)
def test_a_healthy_loss_is_no_jump(good: tuple[float, ...], loss: float) -> None:
    assert jump_of(loss, losses(*good), SETTINGS) == ""


@pytest.mark.parametrize(("good", "loss"), [((2.0,), 2.26), ((8.0,), 8.9), ((1.7, 1.65, 1.62), 5758.0)])
def test_a_loss_beyond_all_bounds_has_jumped_and_the_reason_has_the_numbers(
    good: tuple[float, ...], loss: float
) -> None:
    assert f"jumps to {loss:.4g}, from {min(good):.4g} at best of late" in jump_of(loss, losses(*good), SETTINGS)


@pytest.mark.parametrize("loss", [None, nan, inf])
@pytest.mark.parametrize("good", [(), (2.0, 1.9)])
def test_a_loss_that_is_not_finite_has_always_jumped(loss: float | None, good: tuple[float, ...]) -> None:
    assert jump_of(loss, losses(*good), SETTINGS) == "the held-out loss is not finite"


def test_the_bound_is_the_settings() -> None:
    assert limit_of(losses(0.01), replace(SETTINGS, jump=0.002)) == pytest.approx(0.012)


def test_nothing_follows_where_nothing_has_jumped() -> None:
    assert response_to(state(good=losses(2.0, 1.9)), SETTINGS).action == "none"


JUMP = Evaluated(50, 9.5, 500)


def test_the_syncer_goes_back_to_the_last_commit_that_evaluated_well() -> None:
    response = response_to(state(good=losses(2.0, 1.9), jump=JUMP), SETTINGS)
    assert (response.action, response.to) == ("rollback", 20)
    assert response.reason == "the loss of commit 50 has jumped to 9.5, from 1.9 at commit 20"


def test_the_run_pauses_where_it_says_so_and_the_reason_has_both_ways_to_go_on() -> None:
    response = response_to(state(good=losses(2.0), jump=JUMP), replace(SETTINGS, on_divergence="pause"))
    assert response.action == "pause"
    assert "diloco resume" in response.reason and "diloco rollback RUN --to 10" in response.reason


def test_with_warn_nothing_follows() -> None:
    assert response_to(state(jump=JUMP), replace(SETTINGS, on_divergence="warn")).action == "none"


def test_a_jump_before_the_run_has_recovered_pauses_it_and_people_are_told_where_to_look() -> None:
    response = response_to(state(good=losses(2.0), jump=JUMP, recovers_beyond=400), SETTINGS)
    assert response.action == "pause" and "again after going back" in response.reason
    assert "diloco status" in response.reason and "diloco quarantine LEARNER" in response.reason


@pytest.mark.parametrize(("good", "floor"), [((), 0), (losses(2.0), 11)])
def test_where_there_is_nothing_to_go_back_to_the_run_pauses(good: tuple[Evaluated, ...], floor: int) -> None:
    known = RunState(n=60, gc_floor=floor, stability=Stability(good=good, jump=JUMP))
    response = response_to(known, SETTINGS)
    assert response.action == "pause" and "no commit that evaluated well is kept" in response.reason


def test_collection_keeps_what_a_rollback_may_need_but_not_for_ever() -> None:
    far = 10 + overdue_after(RUN)
    known = Stability(good=losses(2.0))
    assert needed_from(RunState(n=far, stability=known), RUN) == 10
    assert needed_from(RunState(n=far + 1, stability=known), RUN) is None
    assert needed_from(RunState(n=5), RUN) is None


def test_people_are_told_while_no_evaluation_comes() -> None:
    far = 10 + overdue_after(RUN)
    assert concern(RunState(n=far, stability=Stability(good=losses(2.0))), RUN) == ""
    told = concern(RunState(n=far + 1, stability=Stability(good=losses(2.0))), RUN)
    assert told == "the loss is not evaluated since commit 10: until it is, nobody sees a loss that jumps"
    assert concern(RunState(n=far + 1, base_floor=far, stability=Stability(good=losses(2.0))), RUN) == ""


def test_people_are_told_of_a_jump_and_of_a_pause() -> None:
    assert "the loss of commit 50 has jumped to 9.5" in concern(state(good=losses(2.0), jump=JUMP), RUN)
    notes = Metrics(notes=(Note("then", "stop", "syncer", "stopped: how to go on"),))
    paused = RunState(n=60, stability=Stability(paused=True), metrics=notes)
    assert concern(paused, RUN) == "the run pauses, as its loss has jumped; stopped: how to go on"
