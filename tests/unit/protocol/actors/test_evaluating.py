"""What a syncer makes of evaluations and trials, with an evaluator that answers what the test says."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.actors.evaluating import READINGS, REJUDGED_WITHIN_S, TRIES, Evaluations, NoEvaluator
from diloco_cli.protocol.log.commit_log import no_pulse
from diloco_cli.protocol.log.commits import Commit, Evaluation, Quarantine, Stop
from diloco_cli.protocol.log.operations import Now
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.stability import Evaluated, Rejudging, Stability
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.divergence import evaluates_every
from diloco_cli.protocol.rules.rejudging import LeaveOut
from tests.unit.protocol.records import RUN, genesis, make_run

GOOD, HEAD = Evaluated(4, 1.6, 100), Evaluated(5, 9.5, 200)


class Answering:
    """Implements protocol.actors.ports.Evaluator: each trial gets `loss_without` of the learners left out."""

    def __init__(self, loss_without: dict[tuple[str, ...], float | None]) -> None:
        self.loss_without = loss_without
        self.trials: list[LeaveOut] = []
        self.answer: tuple[int, float | None] | None = None

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        return False

    def try_without(self, trial: LeaveOut) -> bool:
        self.trials.append(trial)
        self.answer = trial.head, self.loss_without[trial.without]
        return True

    def result(self) -> tuple[int, float | None] | None:
        answer, self.answer = self.answer, None
        return answer


def rejudged(loss_without: dict[tuple[str, ...], float | None], run: RunFormat = RUN) -> tuple[Commit, list[LeaveOut]]:
    """The commit that ends a re-judgement of l0 and l1."""
    evaluator = Answering(loss_without)
    evaluations, now_s = Evaluations(run, evaluator), 0.0
    known = Stability(good=(GOOD,), rejudging=Rejudging((GOOD,), HEAD, ("l0", "l1")))
    state = RunState(n=7, base_floor=6, outputs=genesis().outputs, stability=known)
    for _ in range(50):
        commit, now_s = due(evaluations, state, now_s + 1.0), now_s + 1.0
        if commit is not None:
            return commit, evaluator.trials
    raise AssertionError("it has no end")


def due(evaluations: Evaluations, state: RunState, now_s: float = 0.0) -> Commit | None:
    steps = evaluations.due(state, 1, no_pulse)
    try:
        assert isinstance(next(steps), Now)
        steps.send(now_s)
    except StopIteration as end:
        found: Commit | None = end.value
        return found
    raise AssertionError("it asks the store")


def test_the_learner_without_which_the_loss_stays_low_is_quarantined_for_the_commit_that_jumped() -> None:
    commit, trials = rejudged({("l0",): 9.4, ("l1",): 1.5})
    assert isinstance(commit, Quarantine) and (commit.learner, commit.evaluated) == ("l1", HEAD.n)
    assert trials == [LeaveOut(4, 5, ("l0",)), LeaveOut(4, 5, ("l1",))]


def test_a_learner_that_the_quorum_needs_is_not_held_back_and_the_run_pauses() -> None:
    commit, _ = rejudged({("l0",): 9.4, ("l1",): 1.5}, make_run(quorum=2))
    assert isinstance(commit, Stop) and commit.diverged
    assert "l1: its deltas alone" in commit.reason and "1 learners would be left, and the quorum is 2" in commit.reason


def test_nobody_to_blame_pauses_the_run() -> None:
    commit, _ = rejudged({("l0",): 9.4, ("l1",): 9.3})
    assert isinstance(commit, Stop) and commit.diverged and commit.reason.startswith("went back to commit 4: the loss")


def test_a_trial_that_fails_is_made_again_and_then_the_run_pauses() -> None:
    commit, trials = rejudged({("l0",): None, ("l1",): 1.5})
    assert trials == [LeaveOut(4, 5, ("l0",))] * TRIES
    assert isinstance(commit, Stop) and "commit 5 without the deltas of l0 cannot be evaluated" in commit.reason


def test_a_re_judgement_ends_in_time() -> None:
    evaluations = Evaluations(RUN, Answering({("l0",): None}))
    known = Stability(good=(GOOD,), rejudging=Rejudging((GOOD,), HEAD, ("l0", "l1"), {"l1": 9.0}))
    state = RunState(n=7, base_floor=6, outputs=genesis().outputs, stability=known)
    assert due(evaluations, state) is None
    commit = due(evaluations, state, REJUDGED_WITHIN_S + 1.0)
    assert isinstance(commit, Stop) and commit.diverged
    assert "no verdict came within 30 minutes; the longest delta of l1 has 9.0 times" in commit.reason


def test_a_re_judgement_of_a_large_model_has_the_time_to_read_it() -> None:
    """A billion parameters: 160 s for each reading of all states."""
    run = replace(RUN, layout=balanced_layout([ParameterFact("w", (10**9,), False)], 1))
    evaluations = Evaluations(run, Answering({("l0",): None}))
    known = Stability(good=(GOOD,), rejudging=Rejudging((GOOD,), HEAD, ("l0", "l1"), {"l1": 9.0}))
    state = RunState(n=7, base_floor=6, outputs=genesis().outputs, stability=known)
    reading_s = READINGS * 160.0
    found = [due(evaluations, state, now_s) for now_s in (0.0, REJUDGED_WITHIN_S + reading_s - 1.0)]
    assert found == [None, None]
    assert isinstance(due(evaluations, state, REJUDGED_WITHIN_S + reading_s + 1.0), Stop)


def test_a_syncer_that_cannot_evaluate_pauses_an_open_re_judgement_with_words() -> None:
    evaluations, state = Evaluations(RUN, NoEvaluator()), judging()
    found = [due(evaluations, state) for _ in range(TRIES + 3)]
    stop = next(commit for commit in found if commit is not None)
    assert isinstance(stop, Stop) and stop.diverged and "cannot be evaluated" in stop.reason


class Busy(Answering):
    """Takes evaluations as well, and notes them."""

    def __init__(self, loss_without: dict[tuple[str, ...], float | None]) -> None:
        super().__init__(loss_without)
        self.evaluated: list[int] = []

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        self.evaluated.append(n)
        return True


EVERY = evaluates_every(RUN)


def judging(**known: object) -> RunState:
    stability = Stability(good=(GOOD,), rejudging=Rejudging((GOOD,), HEAD, ("l0", "l1")), **known)  # type: ignore[arg-type]
    return RunState(n=7, base_floor=6, slot=EVERY, outputs=genesis().outputs, stability=stability)


def test_the_loss_is_evaluated_while_a_jump_is_re_judged() -> None:
    evaluations = Evaluations(RUN, evaluator := Busy({("l0",): 9.4, ("l1",): 1.5}))
    assert due(evaluations, judging()) is None and evaluator.evaluated == [7]
    evaluator.answer = 7, 9.9
    heard = due(evaluations, judging())
    assert isinstance(heard, Evaluation) and heard.jumped
    commit = None
    while commit is None:
        commit = due(evaluations, judging(jump=Evaluated(7, 9.9, 300)))
    assert isinstance(commit, Quarantine), "a jump meanwhile waits for the verdict"


@pytest.mark.parametrize(("since", "evaluates"), [(EVERY - 1, []), (EVERY, [7])])
def test_a_syncer_that_takes_over_evaluates_when_its_predecessor_would_have(since: int, evaluates: list[int]) -> None:
    evaluations = Evaluations(RUN, evaluator := Busy({}))
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
    evaluations, state = Evaluations(RUN, evaluator := Answering({})), RunState(n=8, base_floor=6)
    evaluator.answer = answer
    assert evaluations._heard(state) == logged


def test_a_loss_that_is_not_finite_is_logged_as_a_jump() -> None:
    evaluations = Evaluations(RUN, evaluator := Answering({}))
    evaluator.answer = 7, nan
    heard = evaluations._heard(RunState(n=8))
    assert heard == Evaluation(evaluated=7, loss=None, tokens=0, jumped=True, reason="the held-out loss is not finite")
