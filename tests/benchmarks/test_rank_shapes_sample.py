"""A small form of what `plan` says of the memory of large models on many ranks: on fake tensors."""

from __future__ import annotations

import pytest

from tests.benchmarks.rank_memory import WITHIN
from tests.benchmarks.rank_shapes import ShapeCase, measured_gb


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_rank_of_a_fake_model_holds_what_plan_says(checkpointing: bool) -> None:
    case = ShapeCase("small", 4, 8, checkpointing)
    assert measured_gb(case) == pytest.approx(case.planned_gb(), rel=WITHIN)
