"""What is believed of stated work: by the syncer's clock, and by the other learners' deltas."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from diloco_cli.config.codec import replace
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.log.records import Island, MergedOffer, RunFormat
from diloco_cli.protocol.log.state import LearnerRecord, RunState
from diloco_cli.protocol.rules.belief import (
    GROWS,
    GUESS_ROUNDS,
    GUESSED,
    SAMPLED,
    Belief,
    at_work,
    most_saved,
    planned_rate,
    proven,
    rate_after,
)
from diloco_cli.protocol.rules.merging import max_rounds
from tests.unit.protocol.records import BATCH, RUN, applied, genesis, make_run, offer

STEP_S = RUN.islands[0].step_s
RATE = BATCH / STEP_S  # tokens/s, as planned
ROUND_S = 4 * STEP_S
MOST = most_saved(RUN, "l0")
LARGE = SAMPLED


def believed(belief: Belief, tokens: int, now_s: float, state: RunState, fragment: int = 0) -> int:
    """Of an offer of so many tokens, which is merged."""
    found = belief.of(state, replace(offer(state, fragment), tokens=tokens), now_s)
    belief.merged(state, fragment, {"l0": found}, now_s)
    return found


def begun(state: RunState, run: RunFormat = RUN) -> Belief:
    belief = Belief(run)
    belief.begin(state, 0.0)
    return belief


def serving(**known: Any) -> RunState:
    """The log, long after its beginning."""
    return structs.replace(genesis(), n=99, learners={"l0": LearnerRecord(**known)})


def test_what_the_clock_bears_out_is_believed_in_full_and_nothing_beyond_it_however_it_is_divided() -> None:
    belief, state, counted = begun(genesis()), genesis(), 0
    for k in range(1, 101):
        assert believed(belief, 16, k * ROUND_S, state) == 16, "16 tokens a round, as planned"
        counted += believed(belief, 10**6, k * ROUND_S, state, fragment=1)
        assert counted <= k * ROUND_S * RATE + k, "one token at least of each offer"


def test_offers_that_come_unevenly_are_believed_as_what_came_late_was_saved_up() -> None:
    belief, state = begun(genesis()), genesis()
    for rounds in (1.0, 2.5, 3.0, 4.5, 5.0):
        assert believed(belief, 16, rounds * ROUND_S, state) == 16


def test_where_the_syncer_is_many_times_too_slow_its_learners_lose_nothing() -> None:
    belief, state = begun(genesis()), genesis()
    for k in range(1, 20):
        assert believed(belief, MOST, k * max_rounds(RUN.settings.sync) * ROUND_S, state) == MOST


def test_after_an_outage_as_much_is_believed_as_an_offer_can_hold_and_no_more() -> None:
    belief, state = begun(genesis()), genesis()
    assert believed(belief, MOST, 1e6, state) == MOST
    assert believed(belief, MOST, 1e6, state) == 1


def test_a_successor_gives_what_one_may_have_trained_while_nobody_counted_but_once() -> None:
    belief, state = begun(serving()), serving()
    assert believed(belief, 10**6, 0.0, state) == MOST
    assert believed(belief, 10**6, ROUND_S, state) == RATE * ROUND_S


def test_the_proven_speed_of_the_log_counts_also_for_a_successor() -> None:
    belief, state = begun(serving(proven=3 * RATE)), serving(proven=3 * RATE)
    assert believed(belief, 10**6, 0.0, state) == MOST
    assert believed(belief, 10**6, ROUND_S, state) == 3 * RATE * ROUND_S


def test_where_nothing_is_planned_all_is_believed() -> None:
    run = replace(RUN, islands=tuple(replace(island, step_s=0.0) for island in RUN.islands))
    assert believed(begun(genesis(), run), 10**6, 0.0, genesis()) == 10**6


def test_an_island_that_joins_begins_with_nothing_and_at_the_usual_speed_of_the_launch() -> None:
    new = Island("new", "here", 8 * BATCH, 4, 0.0, 0.0)
    state = structs.replace(genesis(), members=(new,))
    assert planned_rate(state.with_members(RUN), "new") == RATE
    belief = begun(genesis())
    belief.met(["new"], 0.0)
    assert belief.of(state, replace(offer(state), learner="new", tokens=10**6), ROUND_S) == RATE * ROUND_S


def test_a_speed_grows_by_a_quarter_a_round_and_early_up_to_eight_times_the_plan() -> None:
    late = GUESS_ROUNDS * 4
    rate = RATE
    for _ in range(4):
        rate = rate_after(rate, RATE, late, 4, stated=800, believed=100)
    assert rate == pytest.approx(GROWS * RATE)
    assert rate_after(RATE, RATE, late, 4, stated=101, believed=100) == pytest.approx(1.01 * RATE)
    assert rate_after(RATE, RATE, 0, 4, stated=500, believed=100) == 5 * RATE
    assert rate_after(RATE, RATE, late - 1, 4, stated=3200, believed=100) == GUESSED * RATE
    assert rate_after(40 * RATE, RATE, 0, 4, stated=3200, believed=100) < GROWS * 40 * RATE
    assert rate_after(RATE, RATE, late, 4, stated=1, believed=0) == RATE, "what no syncer writes"


@pytest.mark.parametrize("times", [2.0, 3.0])
def test_a_machine_that_becomes_faster_is_believed_within_six_rounds(times: float) -> None:
    run, counted = make_run(), 0
    belief, state = begun(genesis()), serving(merges=GUESS_ROUNDS * 2)
    for k in range(1, 7):
        for fragment in (0, 1):
            now_s, tokens = (k + fragment / 2) * ROUND_S, round(times * 16)
            counted = believed(belief, tokens, now_s, state, fragment)
            item = applied(tokens=tokens, believed=counted, cosine=1.0)
            other = applied("l1", cosine=1.0)
            known = state.learners["l0"]
            after = proven(run, state.learners, fragment, [item, other])[0].proven
            state = structs.replace(
                state, learners={"l0": structs.replace(known, proven=after, merges=known.merges + 1)}
            )
    assert counted == round(times * 16)


@pytest.mark.parametrize("times", [4.0, 8.0])
def test_what_was_doubted_is_believed_once_the_first_rounds_have_proven_a_speed(times: float) -> None:
    """The clock bears it out. Nothing is believed twice, and later rounds look back no more."""
    belief, state, counted, stated = begun(genesis()), genesis(), 0, 0
    num_parameters = RUN.layout.fragments[0].num_parameters
    for k in range(1, 3):
        found = believed(belief, 16, k * ROUND_S / times, state)
        counted, stated = counted + found, stated + 16
        doubted = (stated - counted) * num_parameters
        state = serving(merges=k, proven=times * RATE, doubted=doubted)
    assert counted == stated and doubted == 0
    assert believed(belief, 16, 3 * ROUND_S / times, serving(merges=99, proven=times * RATE)) == 16
    late = serving(merges=99, proven=2 * times * RATE, doubted=10**6 * num_parameters)
    assert believed(belief, 16, 4 * ROUND_S / times, late) == 32, "of the last round alone"


def test_the_speed_of_an_island_of_which_nothing_is_known_counts_from_when_it_is_first_met() -> None:
    """A commit of another process has admitted it."""
    belief, state = begun(genesis()), structs.replace(genesis(), members=(Island("new", "here", BATCH, 4, 0.0, 0.0),))
    made = replace(offer(state), learner="new", tokens=10**6)
    assert belief.of(state, made, 8.0) == 1
    assert belief.of(state, made, 9.0) == RATE


def found(*cosines: float, parameters: int = LARGE) -> set[str]:
    """Who is at work, by each one's cosine to the others."""
    return at_work([applied(f"l{n}", norm=1.0, cosine=cosine) for n, cosine in enumerate(cosines)], parameters)


def test_whose_delta_points_where_those_of_the_others_point_is_at_work() -> None:
    assert found(0.3, 0.01, -0.003) == {"l0", "l1"}, "by however little, of many parameters"
    assert found(0.3, 0.3, 0.0) == {"l0", "l1"}, "a loop that does nothing"
    assert found(0.0, 0.0) == set(), "of two that have nothing in common nobody can tell"


def test_of_few_parameters_a_cosine_is_more_easily_chance() -> None:
    assert found(0.3, 0.3, parameters=100) == set()
    assert found(0.5, 0.5, parameters=1) == {"l0", "l1"}


def test_what_is_merged_alone_is_work_unless_it_is_empty() -> None:
    assert found(0.0) == {"l0"}
    assert at_work([applied(norm=0.0)], LARGE) == set()


@pytest.mark.parametrize("strange", [{"norm": 1e300}, {"weight": 0.0}, {"weight": 1e308}, {"cosine": -1.0}])
def test_what_a_log_may_state_has_an_answer(strange: dict[str, Any]) -> None:
    assert at_work([applied(**strange), applied("l1", **strange)], 1) <= {"l0", "l1"}


def test_a_merge_states_what_is_proven_by_those_at_work_of_whom_less_is_believed() -> None:
    def input_of(name: str, **fields: Any) -> MergedOffer:
        return applied(name, **{"believed": 2, "cosine": 0.2, **fields})

    inputs = [input_of("l0"), input_of("l1", believed=None), input_of("x", cosine=0.0)]
    run = replace(make_run(), layout=balanced_layout([ParameterFact("w", (LARGE,), False)], 1))
    rates = [item.proven for item in proven(run, {"x": LearnerRecord(proven=7.0)}, 0, inputs)]
    assert rates == [4 * RATE, 0.0, 7.0]
