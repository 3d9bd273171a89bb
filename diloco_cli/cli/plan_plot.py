"""The waterfall of a plan as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.plots import bar_chart
from diloco_cli.units import format_count, format_duration

if TYPE_CHECKING:
    from diloco_cli.plan.plan import Plan


def waterfall_svg(plan: Plan) -> str:
    """From ideal to predicted, and synchronous training beside it: tokens per second and days to the target."""
    p = plan.prediction
    rows = [(stage.name, stage.tokens_per_s, stage.days) for stage in p.waterfall]
    rows.append(("synchronous", p.synchronous_tokens_per_s, p.synchronous_days_to_target))
    bars = [(name, rate, f"{format_count(rate)} tok/s, {format_duration(days * 86_400)}") for name, rate, days in rows]
    target = format_count(plan.run.train.tokens)
    return bar_chart(f"{plan.run.name}: {len(plan.islands)} islands, {target} tokens", bars)
