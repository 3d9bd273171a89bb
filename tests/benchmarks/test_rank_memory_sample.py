"""A small form of what `plan` says of the memory of ranks: two real ones with what their host holds, and one alone."""

from __future__ import annotations

import pytest

from tests.benchmarks.rank_memory import MemoryCase, measured

WITHIN = 0.25  # of some hundred MB: what a process allocates beside its model weighs more than in the benchmark

CASES = [MemoryCase("small", 1, 8), MemoryCase("small", 2, 8, host=True)]


@pytest.mark.parametrize("case", CASES, ids=["one rank", "two ranks"])
def test_a_ranks_memory_is_what_plan_says(case: MemoryCase) -> None:
    assert measured(case) == pytest.approx(case.planned(), rel=WITHIN)
