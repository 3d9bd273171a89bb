"""The integers that histories train on: what honest learners send differs, and is of like length."""

from __future__ import annotations

from itertools import pairwise

from tests.histories.integers import gradient
from tests.histories.options import MAX_LEARNERS
from tests.histories.poisoner import CLIP

NAMES = [f"{role}{number}" for role in "ln" for number in range(MAX_LEARNERS)]
STARTS = range(0, 40_000, 7)


def test_no_honest_learner_is_so_far_in_its_data_that_its_deltas_are_too_long_beside_others() -> None:
    per_token = [gradient(name, start, start + n) / n for name in NAMES for start in STARTS for n in (1, 4, 30)]
    assert max(per_token) < CLIP * min(per_token)


def test_each_range_gives_a_delta_of_its_own_and_its_parts_add_up_to_it() -> None:
    made = [gradient("l0", start, start + 4) for start in STARTS]
    assert len(set(made)) == len(made)
    parts = sum(gradient("l0", start, end) for start, end in pairwise(STARTS))
    assert parts == gradient("l0", STARTS[0], STARTS[-1])
