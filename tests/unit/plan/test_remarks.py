"""Plans that work on paper alone are warned of, with what to change."""

from __future__ import annotations

import pytest

from diloco_cli.plan.remarks import horizon_warnings, rounded_down, snapshot_warnings, step_warnings


def test_years_are_warned_of_with_the_tokens_of_a_week() -> None:
    assert horizon_warnings(20_000_000_000, 364.0) == []
    (said,) = horizon_warnings(20_000_000_000, 1213.0)
    assert "20B tokens take 3.3 years" in said and "--set train.tokens=100M takes a week" in said


@pytest.mark.parametrize(
    ("step_s", "batch_tokens", "says"),
    [
        (2760.0, 524_288, "one step takes 46 min: batch_tokens: 1024 makes it 5.39 s"),
        (61.0, 131_072, "one step takes 61 s: batch_tokens: 20480 makes it 9.53 s"),
        (300.0, 4096, "one step takes 5 min, and 75 s with a single sequence: a smaller model, or a faster device"),
    ],
)
def test_a_step_of_minutes_is_warned_of_with_a_batch_that_suits(step_s: float, batch_tokens: int, says: str) -> None:
    assert step_warnings("home", step_s, batch_tokens, 1024) == [f"home: {says}"]
    assert step_warnings("home", 60.0, batch_tokens, 1024) == []


def test_a_run_whose_log_outgrows_its_snapshots_is_warned_of() -> None:
    assert snapshot_warnings(1750, 40) == []
    (said,) = snapshot_warnings(2048, 40)
    assert "2048 islands with 40 fragments" in said and said.endswith("--set sync.fragments=34")


def test_numbers_are_rounded_down_to_one_digit() -> None:
    assert [rounded_down(value) for value in (48_300_000, 9.9, 0.2, 1000)] == [40_000_000, 9, 1, 1000]
