"""A simulated run for people: 80 columns."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from diloco_cli.cli.simulate_view import COLUMNS, table
from diloco_cli.units import format_count, format_duration, format_size

if TYPE_CHECKING:
    from diloco_cli.simulate.what_if import IslandReport, WhatIf

HEADINGS = ("ISLAND", "GOODPUT", "MERGED", "TRAINED", "MERGES", "STALL", "DOWN", "STARTS", "UP/DOWNLOAD")
MOST_FAULT_LINES = 12


def run_text(outcome: WhatIf, seed: int, wall_s: float) -> str:
    blocks = [
        _headline(outcome),
        table([HEADINGS, *map(_row, outcome.islands)]),
        _faults(outcome),
        [line for warning in outcome.warnings for line in wrap(f"warning: {warning}", COLUMNS)],
        wrap(
            f"seed {seed}, simulated in {format_duration(wall_s)}. Goodput: tokens merged over what islands "
            "would have processed undisturbed. Refused offers were mostly superseded by a newer one of the same "
            "fragment. Nothing was trained.",
            COLUMNS,
        ),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _headline(outcome: WhatIf) -> list[str]:
    share = 100 * outcome.tokens / outcome.tokens_target
    how = "finished" if outcome.finished else "so far"
    lines = [
        f"{outcome.name}: {format_duration(outcome.simulated_s)} of virtual time, {outcome.merges} merges, "
        f"{outcome.skips} skipped slots, {outcome.offers_refused} offers refused, {how}",
        f"tokens {format_count(outcome.tokens)} of {format_count(outcome.tokens_target)} ({share:.1f} %), "
        f"{format_count(outcome.tokens_per_s)} tok/s merged, goodput {100 * outcome.goodput:.1f} %, "
        + (f"participation {100 * outcome.participation:.1f} %" if outcome.participation is not None else "no merge"),
    ]
    sent = f"up {format_size(outcome.bytes_up)}, down {format_size(outcome.bytes_down)}, epochs {outcome.epochs}"
    if outcome.days_to_target is not None:
        sent += f"; at this rate the target takes {format_duration(outcome.days_to_target * 86_400)}"
    if outcome.cost_to_target:
        sent += f" and costs {outcome.cost_to_target:,.0f}"
        if outcome.not_charged:
            sent += f", not counting {', '.join(outcome.not_charged)}"
    return [line for text in (*lines, sent) for line in wrap(text, COLUMNS)]


def _row(island: IslandReport) -> tuple[str, ...]:
    return (
        island.name,
        f"{100 * island.goodput:.1f}%",
        format_count(island.tokens_merged),
        format_count(island.tokens_processed),
        str(island.merges),
        format_duration(island.stalled_s) if island.stalled_s else "-",
        format_duration(island.down_s) if island.down_s else "-",
        str(island.incarnations),
        f"{format_size(island.bytes_up)}/{format_size(island.bytes_down)}".replace(" ", ""),
    )


def _faults(outcome: WhatIf) -> list[str]:
    if not outcome.log:
        return []
    skipped = sum(bool(fault.skipped) for fault in outcome.faults)
    shown = outcome.log[:MOST_FAULT_LINES]
    lines = [part for line in shown for part in wrap(f"  {line}", COLUMNS, subsequent_indent="    ")]
    more = len(outcome.log) - len(shown)
    head = f"faults and failures: {len(outcome.log)}" + (f", {skipped} skipped by the constraints" if skipped else "")
    return [head, *lines, *([f"  and {more} more"] if more else [])]
