"""A sample of the search for attacks by norm, timing, batches of offers and restarts of the syncer. All of it:
python -m tests.security.norm_search, python -m tests.security.poisons; results in README.md."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diloco_cli.protocol.log.directions import OPPOSES
from diloco_cli.protocol.rules.eligibility import offered_weight
from tests.security import norm_replay
from tests.security.attacks.hostile import Strategy
from tests.security.contest import Contest, Score, contest, contest_run
from tests.security.norm_replay import WORST
from tests.security.norm_search import AFTER_OUTAGES, MAX_DRIFT, MAX_RISE, SEARCHED, SPACE, changed, drawn, played
from tests.security.poisons import compared

ROUNDS = 12
SHORTENED = {
    "below what is refused": Strategy(scale=7.5),
    "with more steps than it made": Strategy(scale=7.5, claims=8.0),
    "all of it in one small tensor": Strategy(scale=7.5, focus=True, claims=8.0, begins=0),
    "before anything is usual": Strategy(scale=50.0, claims=8.0, direction="random", begins=0),
}
IDLE = {
    "next to nothing": Strategy(scale=0.01, direction="aligned", begins=8),
    "all of it in one tensor after outages": replace(
        AFTER_OUTAGES, scale=3.0, direction="aligned", focus=True, honest_between=3
    ),
}
OF_FINDINGS = {
    "offers left while no syncer lives": Strategy(
        scale=1e4, in_silence=True, waits=False, ahead=3, restart_every=16, outage_slots=3.0
    ),
    "a batch of bad deltas in one slot": Strategy(scale=1e3, copies=4, waits=False),
    "each fault paid back by an honest offer": Strategy(scale=1e3, honest_between=1),
}


@pytest.mark.parametrize("strategy", OF_FINDINGS.values(), ids=OF_FINDINGS.keys())
def test_a_hostile_learner_of_three_does_no_harm_by_long_deltas(strategy: Strategy) -> None:
    trial = played(strategy, rounds=ROUNDS)
    assert trial.reached and set(trial.blamed) <= {"x0"}
    assert trial.worst_rise <= MAX_RISE and trial.drift <= MAX_DRIFT, trial.line(0)


@pytest.mark.parametrize("strategy", SHORTENED.values(), ids=SHORTENED.keys())
def test_no_merge_of_long_deltas_that_nobody_refuses_raises_the_loss(strategy: Strategy) -> None:
    trial = played(strategy, rounds=SEARCHED)
    assert trial.reached and trial.worst_rise <= MAX_RISE and not trial.rollbacks, trial.line(0)


@pytest.mark.parametrize("strategy", IDLE.values(), ids=IDLE.keys())
def test_deltas_that_hold_little_or_lie_in_one_tensor_do_not_slow_the_others_down(strategy: Strategy) -> None:
    """They have a third of the tokens. When they weighed as much they cost 2.5 and 4 %."""
    trial = played(strategy, rounds=SEARCHED)
    assert trial.reached and trial.worst_rise <= MAX_RISE and trial.drift <= MAX_DRIFT, trial.line(0)


def test_a_flip_right_after_an_outage_weighs_little_already_in_its_own_merge() -> None:
    """Honest deltas hold few steps then. When it counted from the next merge on it cost 6.5 %."""
    trial = played(AFTER_OUTAGES, rounds=SEARCHED)
    assert trial.reached and trial.worst_rise <= MAX_RISE and trial.drift <= MAX_DRIFT, trial.line(0)


@pytest.mark.parametrize("scale", [1.0, 7.5])
def test_a_hostile_learner_of_three_that_flips_signs_costs_next_to_nothing(scale: float) -> None:
    trial = played(Strategy(scale=scale, begins=4, honest_between=1), rounds=SEARCHED)
    assert trial.reached and trial.worst_rise <= MAX_RISE and trial.drift <= MAX_DRIFT, trial.line(0)


def test_rare_flips_between_good_deltas_beside_a_syncer_that_is_killed_cost_little() -> None:
    trial = played(WORST["flipped in silence"], rounds=SEARCHED)
    assert trial.reached and trial.worst_rise <= MAX_RISE and trial.drift <= 2 * MAX_DRIFT  # of one seed


@pytest.mark.parametrize(("islands", "apart"), [((3, 0), 100), ((8, 0), 64)])
def test_honest_learners_of_unlike_data_are_not_taken_for_opponents(islands: tuple[int, int], apart: int) -> None:
    """Three texts without a byte in common; four groups of two."""
    game = Contest(contest_run(0, islands, apart=apart), None)
    assert game.play(ROUNDS).reached
    inputs = [item for commit, _ in game.commits for item in commit.inputs]
    cosines = [item.agrees for item in inputs if item.agrees is not None]
    assert min(cosines) < -0.2, "they do point apart"
    most = max(value for _, state in game.commits for value in (0.0, *state.opposition.values()))
    assert most < OPPOSES / 2
    run = contest_run(0, islands, apart=apart)
    weights = {(one.weight, offered_weight(run, one.learner, one.tokens, one.steps)) for one in inputs}
    assert all(weight == full for weight, full in weights), weights


def test_four_broken_learners_of_sixteen_do_no_harm_by_long_deltas() -> None:
    score, drift = compared(Strategy(scale=1e3, copies=4), 0, (12, 4), rounds=4)
    assert score.reached and score.worst_rise <= MAX_RISE and drift <= 2 * MAX_DRIFT  # of one seed, and few rounds


def test_a_learner_that_only_offers_the_mean_of_the_others_is_no_measured_harm() -> None:
    """So what a trial shows is the bad deltas' doing, not that of the measurement."""
    assert abs(played(Strategy(begins=10**6, restart_every=8), rounds=ROUNDS).drift) <= MAX_DRIFT


@pytest.mark.long
def test_several_learners_that_only_offer_the_mean_of_the_others_raise_no_loss() -> None:
    score = contest(1, Strategy(begins=10**6), rounds=SEARCHED, islands=(12, 4))
    assert score.reached and score.worst_rise <= MAX_RISE / 10


def test_strategies_are_drawn_by_the_seed_and_neighbours_differ() -> None:
    one, other = drawn(random.Random(3)), drawn(random.Random(3))
    assert one == other and any(changed(one, random.Random(seed)) != one for seed in range(5))
    assert set(SPACE) <= set(Strategy.__dataclass_fields__)


@pytest.mark.parametrize(("drifts", "cell"), [([0.0074], ""), ([0.0142, 0.0192], "+1.92%")])
def test_a_row_states_nothing_of_usual_size_where_that_was_not_tried(
    drifts: list[float], cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(drifts)
    monkeypatch.setattr(norm_replay, "runs", lambda strategy, rounds: ([Score(rises=[0.001])], next(left)))
    told, sound = norm_replay.row(Strategy(), ROUNDS)
    assert sound and told.split("|")[3].strip() == cell and next(left, None) is None, told
