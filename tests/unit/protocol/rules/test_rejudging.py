"""Who is blamed for a jump: by the losses of trials, which a function stands for here."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from diloco_cli.protocol.log.stability import Evaluated, Rejudging
from diloco_cli.protocol.rules.rejudging import ALONE, LeaveOut, Ruling, next_step, unjudged

GOOD, HEAD, LIMIT = 100, 220, 1.9
Loss = Callable[[frozenset[str]], float]


def judged(names: int, loss: Loss, since: int = 150, head: float | None = 9.0) -> tuple[Ruling, list[LeaveOut]]:
    """`loss`: after commit `since`, by the learners that take part; before it, it is 1.6."""
    everybody = tuple(f"l{number:02}" for number in range(names))
    case = Rejudging((Evaluated(GOOD, 1.6, 0),), Evaluated(HEAD, head, 0), everybody)
    losses: dict[LeaveOut, float | None] = {}
    while isinstance(step := next_step(case, losses, LIMIT), LeaveOut):
        assert step not in losses and step.good == GOOD
        losses[step] = 1.6 if step.head < since else loss(frozenset(everybody) - set(step.without))
    return step, list(losses)


def bad(*names: str) -> Loss:
    return lambda present: 9.0 if present & set(names) else 1.55


@pytest.mark.parametrize("learners", [2, 3, 4, 7, 8, 16, 64])
@pytest.mark.parametrize("place", ["first", "last"])
def test_the_one_bad_learner_is_found_among_any_number(learners: int, place: str) -> None:
    name = "l00" if place == "first" else f"l{learners - 1:02}"
    verdict, trials = judged(learners, bad(name))
    assert verdict.learner == name
    assert len(trials) <= 7 + 2 * (learners - 1).bit_length() + ALONE


def test_deltas_are_judged_up_to_the_first_commit_that_jumps_as_later_ones_were_made_from_a_damaged_model() -> None:
    verdict, trials = judged(3, bad("l01"), since=130)
    assert {trial.head for trial in trials if trial.without} == {130}
    assert verdict.reason.endswith("9 after commit 130, 1.55 without them, 1.6 at 100")


def test_a_run_that_diverges_everywhere_blames_nobody_and_says_what_helps() -> None:
    verdict, _ = judged(3, lambda present: 9.0)
    assert verdict.learner is None and "by the deltas of each learner alone: the run diverges" in verdict.reason
    assert "train.inner.lr" in verdict.reason


def test_a_half_that_heals_by_chance_blames_nobody_while_others_diverge_by_themselves() -> None:
    """Without l01 the loss stays low, and each of the others alone raises it all the same."""
    verdict, _ = judged(3, lambda present: 1.6 if present == {"l00", "l02"} else 9.0)
    assert verdict.learner is None and "diverges everywhere" in verdict.reason


def test_several_bad_learners_are_named_and_none_is_held_back() -> None:
    verdict, _ = judged(5, bad("l01", "l04"))
    assert verdict == Ruling(None, verdict.reason)
    assert "each by itself, l01, l04 raise it" in verdict.reason


def test_deltas_that_raise_the_loss_only_together_blame_nobody() -> None:
    verdict, _ = judged(4, lambda present: 9.0 if len(present) >= 2 else 1.6)
    assert verdict.learner is None and "only their deltas together" in verdict.reason


def test_a_learner_by_itself_is_compared_with_nobody() -> None:
    verdict, trials = judged(1, bad("l00"))
    assert verdict.learner is None and "by the deltas of l00, the only ones since" in verdict.reason
    assert not [trial for trial in trials if trial.without]


def test_a_loss_that_is_left_half_as_high_is_not_healed() -> None:
    """Leaving out any learner softens a run that diverges; only what explains most of the jump is blame."""
    verdict, _ = judged(2, lambda present: {2: 2.0, 1: 1.85}[len(present)])
    assert verdict.learner is None


@pytest.mark.parametrize("head", [None, inf])
def test_a_loss_that_is_not_finite_is_judged_as_well(head: float | None) -> None:
    verdict, _ = judged(3, lambda present: inf if "l02" in present else 1.5, head=head)
    assert verdict.learner == "l02"


def case_with(names: tuple[str, ...], **long: float) -> Rejudging:
    return Rejudging((Evaluated(1, 1.6, 0),), Evaluated(2, 9.0, 0), names, long)


ALL = ("l0", "l1", "l2")


@pytest.mark.parametrize("long", [{}, {"l1": 7.5}, {"l0": 2.1, "l1": 7.5}])
def test_where_a_trial_fails_nobody_is_blamed_for_it_may_be_the_culprit_s_own_payload(long: dict[str, float]) -> None:
    case = case_with(ALL, **long)
    first = next_step(case, {}, LIMIT)
    assert isinstance(first, LeaveOut)
    ruling = next_step(case, {first: None}, LIMIT)
    assert isinstance(ruling, Ruling) and ruling.learner is None
    assert ruling.reason.startswith("commit 2 without the deltas of l0 cannot be evaluated")


def test_people_are_told_of_the_one_learner_whose_deltas_were_clearly_too_long() -> None:
    told = unjudged(case_with(ALL, l1=7.5), "no trials").reason
    assert told == "no trials; the longest delta of l1 has 7.5 times the usual norm, no other one is long"


@pytest.mark.parametrize(
    ("names", "long"), [(ALL, {}), (ALL, {"l1": 3.9}), (ALL, {"l0": 2.1, "l1": 7.5}), (("l1",), {"l1": 7.5})]
)
def test_of_norms_that_name_nobody_clearly_nobody_is_named(names: tuple[str, ...], long: dict[str, float]) -> None:
    told = unjudged(case_with(names, **long), "no trials").reason
    assert told == "no trials, and the norms of the deltas blame nobody"
