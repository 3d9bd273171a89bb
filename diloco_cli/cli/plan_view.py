"""A plan for people: verdict, islands, schedule, waterfall, warnings, assumptions. 80 columns are enough.

Plain text without Rich: it looks the same in a terminal and in a pipe, and loads in no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from textwrap import wrap
from typing import TYPE_CHECKING

from diloco_cli.units import format_count, format_duration

if TYPE_CHECKING:
    from diloco_cli.plan.plan import Plan, PlannedIsland

COLUMNS = 80
BAR_COLUMNS = 24
HEADINGS = ("island", "accelerators", "tok/s", "batch", "step", "H_i", "idle", "up Mbps", "down", "GB")
TEXT_COLUMNS = 2  # the first ones stand left, numbers right


def plan_text(plan: Plan) -> str:
    """Everything `plan` has to say, the verdict first."""
    blocks = [
        [f"{plan.verdict}: {plan.why}"],
        _table([HEADINGS, *map(_row, plan.islands)]),
        *map(list, _left_out(plan)),
        _schedule(plan),
        _waterfall(plan),
        _outcome(plan),
        _list("warnings", plan.warnings),
        _list(
            "alternatives",
            [f"{a.name}: {format_count(a.tokens_per_s)} tok/s, {a.reason}" for a in plan.alternatives],
        ),
        _list("assumptions", [f"{a.mark}: {a.text}" for a in plan.assumptions]),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " ".join(
            cell.ljust(width) if index < TEXT_COLUMNS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(island: PlannedIsland) -> tuple[str, ...]:
    nodes = island.devices // int(island.accelerators.rpartition(":")[2])
    return (
        island.name,
        island.accelerators + (f" x{nodes}" if nodes > 1 else ""),
        format_count(island.tokens_per_s),
        format_count(island.batch_tokens),
        format_duration(island.step_s),
        str(island.local_steps),
        f"{island.idle_percent:.0f}%",
        _of(island.up_mbps_needed, island.up_mbps_available),
        _of(island.down_mbps_needed, island.down_mbps_available),
        _of(island.memory_gb_needed, island.memory_gb_available),
    )


def _of(needed: float, available: float | None) -> str:
    """'142/2k', or '142/?' where nothing is known."""
    have = "?" if available is None else format_count(available)
    return f"{needed:.0f}/{have}" if needed >= 10 else f"{needed:.2g}/{have}"


def _left_out(plan: Plan) -> Iterator[list[str]]:
    for island in plan.left_out:
        ways = chain.from_iterable(_wrapped(f"  way out: {way}", "           ") for way in island.ways_out)
        yield [*_wrapped(f"left out: {island.name}: {island.reason}", "  "), *ways]


def _schedule(plan: Plan) -> list[str]:
    s, gamma = plan.schedule, plan.run.sync.grace.gamma
    step, round_, slot = (format_duration(x) for x in (s.round_s / s.sync_every, s.round_s, s.slot_s))
    exchange, grace = format_duration(s.exchange_s), format_duration(s.grace_s)
    return [
        f"round T    {s.sync_every} x {step}, the fastest step, = {round_}; H_i = round(T / step)",
        f"slot       {round_} / {s.fragments} fragments = {slot}, {s.codec}",
        f"overlap    {s.overlap} slots for an exchange of {exchange}: slack {_signed_duration(s.slack_s)}",
        f"quorum     {s.quorum}, grace {grace} ({gamma:g} of the slack, at most one slot)",
    ]


def _signed_duration(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 0 else f"-{format_duration(-seconds)}"


def _waterfall(plan: Plan) -> list[str]:
    p = plan.prediction
    rows = [(stage.name, stage.tokens_per_s) for stage in p.waterfall]
    rows.append(("synchronous", p.synchronous_tokens_per_s))
    lines = []
    for name, rate in rows:
        share = rate / p.tokens_per_s_ideal
        bar = "█" * round(BAR_COLUMNS * share)
        lines.append(f"{name:<15} {format_count(rate):>6} tok/s  {bar:<{BAR_COLUMNS}} {100 * share:5.1f} %")
    return lines


def _outcome(plan: Plan) -> list[str]:
    p = plan.prediction
    target = format_count(plan.run.train.tokens)
    lines = [
        f"{target} tokens in {format_duration(p.days_to_target * 86_400)}",
        f"at least {plan.schedule.quorum} present {100 * p.quorum_probability:.1f} % of the time, "
        f"all {100 * p.all_present_probability:.1f} %",
    ]
    if p.price_per_h or p.egress_per_day:
        total = p.days_to_target * (24 * p.price_per_h + p.egress_per_day)
        lines.append(f"money {p.price_per_h:.2f}/h, egress {p.egress_per_day:.2f}/day, {total:.0f} to the target")
    return lines


def _list(heading: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return [f"{heading}:", *chain.from_iterable(_wrapped(f"  - {line}", "    ") for line in lines)]


def _wrapped(line: str, indent: str) -> list[str]:
    return wrap(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
