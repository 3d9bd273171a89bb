"""Warnings about plans that work on paper alone: years, steps of minutes; and what to change."""

from __future__ import annotations

from diloco_cli.units import format_count, format_duration

YEAR_D = 365.0
DAY_S = 86_400.0
WEEK_D = 7.0
LONG_STEP_S = 60.0
GOOD_STEP_S = 10.0


def horizon_warnings(tokens: int, days: float) -> list[str]:
    """A target that nobody will wait for."""
    if days <= YEAR_D:
        return []
    in_a_week = rounded_down(tokens * WEEK_D / days)
    return [
        f"{format_count(tokens)} tokens take {days / YEAR_D:.1f} years on this hardware: --set"
        f" train.tokens={format_count(in_a_week)} takes a week; or a smaller model, or more islands"
    ]


def step_warnings(name: str, step_s: float, batch_tokens: int, sequence: int) -> list[str]:
    """A step during which nothing is seen or exchanged, and after whose interruption much is lost."""
    if step_s <= LONG_STEP_S:
        return []
    head = f"{name}: one step takes {format_duration(step_s)}"
    fitting = int(batch_tokens * GOOD_STEP_S / step_s) // sequence * sequence
    if fitting >= sequence:
        return [f"{head}: batch_tokens: {fitting} makes it {format_duration(step_s * fitting / batch_tokens)}"]
    one = step_s * sequence / batch_tokens
    return [f"{head}, and {format_duration(one)} with a single sequence: a smaller model, or a faster device"]


def rounded_down(value: float) -> int:
    """To one significant digit: 48_300_000 -> 40_000_000."""
    scale: int = 10 ** max(0, len(str(int(value))) - 1)
    return max(1, int(value) // scale * scale)
