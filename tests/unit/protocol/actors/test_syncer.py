"""What a syncer makes of evaluations, with an evaluator that answers what the test says; when it reads weights."""

from __future__ import annotations

from math import nan

import pytest

from diloco_cli.protocol.actors.syncer import Evaluations, Repairer
from diloco_cli.protocol.log.commit_log import no_pulse
from diloco_cli.protocol.log.commits import Commit, Evaluation
from diloco_cli.protocol.log.health import Stability
from diloco_cli.protocol.log.operations import Get, Now
from diloco_cli.protocol.log.records import FragmentVersion
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.divergence import evaluates_every
from tests.histories.integers import IntegerArithmetic
from tests.unit.protocol.records import RUN, applied, genesis, merge


class Answering:
    """Implements protocol.actors.syncer.Evaluator: notes what it was asked, and has the answer that a test gives it."""

    def __init__(self) -> None:
        self.evaluated: list[int] = []
        self.answer: tuple[int, float | None] | None = None

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        self.evaluated.append(n)
        return True

    def result(self) -> tuple[int, float | None] | None:
        answer, self.answer = self.answer, None
        return answer


def due(evaluations: Evaluations, state: RunState) -> Commit | None:
    try:
        next(evaluations.due(state, 1, no_pulse))
    except StopIteration as end:
        found: Commit | None = end.value
        return found
    raise AssertionError("it asks the store")


EVERY = evaluates_every(RUN)


@pytest.mark.parametrize(("since", "evaluates"), [(EVERY - 1, []), (EVERY, [7])])
def test_a_syncer_that_takes_over_evaluates_when_its_predecessor_would_have(since: int, evaluates: list[int]) -> None:
    evaluations = Evaluations(RUN, evaluator := Answering())
    state = RunState(n=7, slot=40 * EVERY, outputs=genesis().outputs, stability=Stability(since=since))
    evaluations.begin(state)
    assert due(evaluations, state) is None and evaluator.evaluated == evaluates


@pytest.mark.parametrize(
    ("answer", "logged"),
    [
        ((7, 1.5), Evaluation(evaluated=7, loss=1.5, tokens=0)),
        ((7, None), None),  # it failed
        ((5, 1.5), None),  # a rollback has undone what was evaluated
    ],
)
def test_an_evaluation_is_logged_unless_it_failed_or_came_too_late(
    answer: tuple[int, float | None], logged: Evaluation | None
) -> None:
    evaluations, state = Evaluations(RUN, evaluator := Answering()), RunState(n=8, base_floor=6)
    evaluator.answer = answer
    assert due(evaluations, state) == logged


def test_a_loss_that_is_not_finite_is_logged_as_a_jump() -> None:
    evaluations = Evaluations(RUN, evaluator := Answering())
    evaluator.answer = 7, nan
    heard = due(evaluations, RunState(n=8))
    assert heard == Evaluation(evaluated=7, loss=None, tokens=0, jumped=True, reason="the held-out loss is not finite")


def looks(repairer: Repairer, state: RunState, now_s: float, slot_s: float) -> bool:
    """Whether it reads weights in a turn at this time."""
    steps = repairer.due(state, 1, slot_s, no_pulse)
    assert next(steps) == Now()
    try:
        return isinstance(steps.send(now_s), Get)
    except StopIteration:
        return False


@pytest.mark.parametrize("slot_s", [120.0, 30.0])
def test_weights_are_read_after_two_rounds_as_long_as_its_merges_show(slot_s: float) -> None:
    """A pace may be believed that is four times as fast as the merges are."""
    repairer, state, apart_s = Repairer(RUN, IntegerArithmetic(RUN), lambda output: None), genesis(), 120.0
    for k in range(5):
        assert not looks(repairer, state, k * apart_s, slot_s)
        state = merge(state, applied(seq=k, base=state.outputs[k % 2].version, data_start=8 * k, data_end=8 * k + 8))
    merged_s, usual_s = 5 * apart_s, 2 * RUN.num_fragments * apart_s + RUN.settings.sync.skip_after_s
    assert not looks(repairer, state, merged_s, slot_s)
    before_s = merged_s - apart_s + usual_s  # of the other fragment
    assert not looks(repairer, state, before_s - 1, slot_s)
    assert looks(repairer, state, before_s, slot_s)
