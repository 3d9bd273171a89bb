"""Token weights: by hand, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.protocol.rules.merging import token_weight

quick = settings(max_examples=60, deadline=None)


def test_half_the_batch_at_equal_steps_weighs_a_quarter() -> None:
    assert token_weight(400, 10) == 4 * token_weight(200, 10) == 16_000


def test_equal_batches_weigh_in_proportion_to_steps() -> None:
    assert token_weight(800, 20) == 2 * token_weight(400, 10)


@pytest.mark.parametrize(("tokens", "steps"), [(0, 0), (0, 5), (5, 0), (-4, 2), (4, -2)])
def test_no_tokens_or_no_steps_weigh_nothing(tokens: int, steps: int) -> None:
    assert token_weight(tokens, steps) == 0.0


@quick
@given(st.integers(0, 1 << 53), st.integers(0, 1 << 53))
def test_a_weight_is_finite_and_zero_only_for_nothing(tokens: int, steps: int) -> None:
    weight = token_weight(tokens, steps)
    assert 0.0 <= weight < float("inf") and (weight == 0.0) == (tokens == 0 or steps == 0)


def test_mixed_batches_and_speeds_by_hand() -> None:
    """A: 10 steps of 400 tokens; B: 10 of 800; C: 5 of 800 (half as fast): quantity x quality."""
    a, b, c = (token_weight(steps * batch, steps) for steps, batch in ((10, 400), (10, 800), (5, 800)))
    assert (a, b, c) == (1_600_000.0, 6_400_000.0, 3_200_000.0)
