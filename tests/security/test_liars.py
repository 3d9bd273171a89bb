"""One of three islands states work that it has not done: nobody else, and no figure of the run, depends on that.

Each liar is compared with a process that does the same and states what an honest one would: at equal honest tokens. One
that offers copies of the others' work can be told from none that works, and ends the run as much earlier as is said
here; the others' steps and the loss do not depend on it either."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.security.contest import Score, contest
from tests.security.hostile import Strategy

ROUNDS, SHARE = 10, 0.02
COPIES = 4.0  # times the tokens
LIARS = {
    "very fast": Strategy(direction="random", begins=0, states_s=1e-9),
    "many steps": Strategy(direction="random", begins=0, claims=40.0),
    "a loop that does nothing": Strategy(scale=0.0, begins=0, claims=40.0, states_s=1e-9),
}


@cache
def scored(strategy: Strategy) -> Score:
    return contest(0, strategy, ROUNDS)


@pytest.mark.parametrize("liar", LIARS.values(), ids=LIARS)
def test_a_liar_moves_neither_the_runs_end_nor_anothers_steps_nor_the_loss(liar: Strategy) -> None:
    lying, honest = scored(liar), scored(replace(liar, claims=1.0, states_s=0.0))
    assert lying.reached and honest.reached
    assert lying.tokens <= honest.tokens * (1 + SHARE)
    assert lying.steps == pytest.approx(honest.steps, rel=SHARE)
    assert lying.final <= honest.final * (1 + SHARE)


def test_a_liar_that_copies_the_others_work_counts_for_several_islands_and_harms_nothing_else() -> None:
    copies = Strategy(direction="aligned", begins=0, claims=40.0, states_s=1e-9)
    lying, honest = scored(copies), scored(replace(copies, claims=1.0, states_s=0.0))
    print(lying.tokens / honest.tokens, lying.steps / honest.steps, lying.final / honest.final)
    assert lying.tokens <= honest.tokens * COPIES
    assert lying.steps == pytest.approx(honest.steps, rel=SHARE)
    assert lying.final <= honest.final * (1 + SHARE)
