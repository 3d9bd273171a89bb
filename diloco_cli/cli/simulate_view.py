"""What `simulate` found, for people: tables of 80 columns, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from diloco_cli.cli.output import table
from diloco_cli.forecast.bandwidth import BandwidthRow
from diloco_cli.forecast.uneven import MixedRow, ScavengedRow
from diloco_cli.plots import Axis, Series, bar_chart, line_chart
from diloco_cli.quantities import format_count, format_duration, format_size

if TYPE_CHECKING:
    from diloco_cli.forecast.goodput import GoodputRow
    from diloco_cli.forecast.run import IslandReport, RunForecast

COLUMNS = 80
RUN_HEADINGS = ("ISLAND", "GOODPUT", "MERGED", "TRAINED", "MERGES", "STALL", "DOWN", "STARTS", "UP/DOWNLOAD")
MAX_FAULT_LINES = 12
NAMES = {
    "data_parallel_no_elasticity": "data-parallel rigid",
    "data_parallel_elastic": "data-parallel elastic",
    "decoupled": "decoupled",
}


def method_name(row: GoodputRow) -> str:
    return f"decoupled M={row.learners}" if row.method == "decoupled" else NAMES[row.method]


def goodput_text(rows: Sequence[GoodputRow], data: dict[str, Any]) -> str:
    """The published grid, beside what was published if the rows have it; or the user's own fleet."""
    blocks = list(_published(rows) if len({row.chips for row in rows}) > 1 else _own_fleet(rows))
    return "\n\n".join("\n".join(block) for block in [*blocks, _footnotes(rows, data)])


def _published(rows: Sequence[GoodputRow]) -> Iterator[list[str]]:
    compared = rows[0].published_goodput_percent is not None
    yield _grid(
        f"goodput, % of chip time{', and the difference to the published figure' if compared else ''}",
        rows,
        lambda row: _beside(row.goodput_percent, row.published_goodput_percent),
    )
    yield _grid(
        f"uptime, % of time in which anything steps{', and the difference' if compared else ''}",
        rows,
        lambda row: _beside(row.uptime_percent, row.published_uptime_percent),
    )
    spreads = [sd for row in rows for sd in (row.goodput_sd, row.uptime_sd) if sd is not None]
    spread = f"standard deviation over seeds <= {max(spreads):.2f}" if spreads else "one seed, so the spread is unknown"
    if not compared:
        yield wrap(
            f"no differences, since what was published is for one interrupt per chip and year; {spread}", COLUMNS
        )
        return
    apart = [
        *(abs(row.goodput_percent - (row.published_goodput_percent or 0)) for row in rows),
        *(abs(row.uptime_percent - (row.published_uptime_percent or 0)) for row in rows),
    ]
    yield [f"largest difference {max(apart):.1f} points, mean {sum(apart) / len(apart):.1f}; {spread}"]


def _beside(ours: float, published: float | None) -> str:
    return _percent(ours) if published is None else f"{_percent(ours)} {ours - published:+.1f}"


def _percent(share: float) -> str:
    return "100" if share >= 99.95 else f"{share:.1f}"


def _grid(title: str, rows: Sequence[GoodputRow], cell: Callable[[GoodputRow], str]) -> list[str]:
    """One line per method, one column per number of chips; lines without a figure are left out."""
    chips = sorted({row.chips for row in rows})
    lines = [["chips", *(format_count(count) for count in chips)]]
    for _, group in groupby(rows, key=lambda row: (row.method, row.learners)):
        mine = {row.chips: row for row in group}
        cells = [cell(mine[count]) for count in chips]
        if any(cells):
            lines.append([method_name(mine[chips[0]]), *cells])
    return [title, *table(lines)]


def _own_fleet(rows: Sequence[GoodputRow]) -> Iterator[list[str]]:
    lines = [["", "goodput", "sd", "uptime", "failures"]]
    lines += [
        [
            method_name(row),
            f"{row.goodput_percent:.2f} %",
            "-" if row.goodput_sd is None else f"{row.goodput_sd:.2f}",
            f"{row.uptime_percent:.2f} %",
            f"{row.failures:,}",
        ]
        for row in rows
    ]
    yield [f"{format_count(rows[0].chips)} chips; goodput is % of chip time, uptime % of time", *table(lines)]


def _footnotes(rows: Sequence[GoodputRow], data: dict[str, Any]) -> list[str]:
    c, days, seeds = data["constants"], data["days"], data["seeds"]
    how = f"{len(seeds)} x {days:g} days, seed {seeds[0]}, from failure to failure, {format_duration(data['wall_s'])}"
    given = "repair_mean_s" in data["given"]
    away = f"away {c['repair_mean_s']:.3g} s on average"
    form = (
        f"exponentiated Weibull: scale {c['repair_scale_s']:.3g} s, shape {c['repair_shape']:g}, exponent "
        f"{c['repair_exponent']:g}"
    )
    text = (
        f"{how}. One chip is interrupted once in {format_duration(c['mtbi_s'])}. "
        f"{f'A failed slice is {away}. ' if given else ''}Fitted, one set for all cells, since the publication does "
        f"not give them: step {c['step_s']:g} s, downscale {c['down_s']:g} s, upscale {c['up_s']:g} s, "
        f"{_slices(rows[-1], c['slice_chips'])}, {f'form of the time away ({form})' if given else f'{away} ({form})'}."
    )
    return wrap(text, COLUMNS)


def _slices(row: GoodputRow, fitted: int) -> str:
    """A learner has whole slices, and at least one."""
    actual = row.chips / row.slices
    here = "" if round(actual) == fitted else f" (here {actual:.4g}, to be whole ones)"
    return f"slices of {fitted} chips{here}"


MIXED_NOTE = (
    "K: the quorum, how many learners a merge waits for. What is published (arXiv 2604.21428) is of 4 learners on "
    "each of two generations of TPUs. It does not say how much slower the one is, and with a quorum of 8 that alone "
    "decides: so that row is not compared, and not fitted. In closed form: with equal steps between merges the K-th "
    "fastest learner sets the pace, and faster ones wait. Islands of diloco have steps of their own in a round, and do "
    "not wait."
)
SCAVENGED_NOTE = (
    "Published (arXiv 2604.21428): 4 learners, and so many more for half of the FLOPs. In closed form: that half goes "
    "faster by the number of learners, who cost the others nothing when they come or go. What data-parallel training "
    "pays for that is not published: its times are as printed, not computed here."
)


def mixed_text(rows: Sequence[MixedRow]) -> str:
    """A line for each rule of merging, a column for each speed of the slower learners."""
    speeds = sorted({row.speed for row in rows})
    lines = [["slower / faster", *(f"{speed:g}" for speed in speeds), "published"]]
    for (quorum, window), group in groupby(rows, key=lambda row: (row.quorum, row.window)):
        mine = list(group)
        published, difference = mine[0].published_goodput_percent, mine[0].difference_points
        beside = f"{published:.0f}" + ("" if difference is None else f" {difference:+.1f}")
        name = f"K={quorum}, {'window' if window else 'no window'}"
        lines.append([name, *(_percent(row.goodput_percent) for row in mine), beside])
    title = "goodput, % of chip time, of 4 faster and 4 slower learners; the difference to the published"
    return "\n".join([*wrap(title, COLUMNS), *table(lines), "", *wrap(MIXED_NOTE, COLUMNS)])


def scavenged_text(rows: Sequence[ScavengedRow]) -> str:
    lines = [["more learners", *(f"{more:g} %" for more in sorted({row.more_percent for row in rows}))]]
    for method, group in groupby(rows, key=lambda row: row.method):
        name = "decoupled" if method == "decoupled" else "data-parallel, printed"
        lines.append([name, *map(_time_cell, group)])
    title = "time to the same tokens, % of that without more learners, and the difference to the published"
    return "\n".join([*wrap(title, COLUMNS), *table(lines), "", *wrap(SCAVENGED_NOTE, COLUMNS)])


def _time_cell(row: ScavengedRow) -> str:
    if row.time_percent is None or row.difference_points is None:
        return f"({row.published_time_percent:.0f})"
    return f"{row.time_percent:.1f} {row.difference_points:+.1f}"


def goodput_plot(rows: Sequence[GoodputRow]) -> str:
    """Goodput against chips, published figures dashed; for one fleet, a bar per method."""
    if len({row.chips for row in rows}) == 1:
        bars = [(method_name(row), row.goodput_percent, f"{row.goodput_percent:.1f} %") for row in rows]
        return bar_chart(f"goodput of {format_count(rows[0].chips)} chips, % of chip time", bars)
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row.method, row.learners))]
    lines = [
        Series(method_name(mine[0]), tuple((row.chips, row.goodput_percent) for row in mine), colour=number)
        for number, mine in enumerate(groups)
    ]
    for number, mine in enumerate(groups):
        known = [(row.chips, row.published_goodput_percent) for row in mine]
        points = tuple((chips, percent) for chips, percent in known if percent is not None)
        if points:
            lines.append(Series("published" if number == 0 else "", points, dashed=True, colour=number))
    y = Axis("goodput, % of chip time", low=0, high=100)
    return line_chart("goodput of a failing fleet", Axis("chips", log=True), y, lines)


def bandwidth_text(rows: Sequence[BandwidthRow]) -> str:
    """One block per step time and number of sites; a line per method, codec and schedule."""
    blocks = []
    for (step_s, sites), group in groupby(rows, key=lambda row: (row.step_s, row.sites)):
        mine = list(group)
        percents = sorted({row.utilisation_percent for row in mine})
        lines = [["utilisation", *(f"{percent:g} %" for percent in percents)]]
        for (method, codec, every, fragments, _), cells in groupby(
            mine, key=lambda row: (row.method, row.codec, row.sync_every, row.fragments, row.overlap)
        ):
            name = "data-parallel bf16" if method == "data_parallel" else f"{codec} H={every} P={fragments}"
            lines.append([name, *map(_gbps, cells)])
        where = f"{sites} sites" if sites > 1 else "1 site"
        title = f"Gbit/s for a compute utilisation, {where}, {format_duration(step_s)} steps; decoupled by H and P"
        blocks.append([title, *table(lines)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _gbps(row: BandwidthRow) -> str:
    figure = f"{row.gbps:.3g}"
    if row.published_gbps is None:
        return figure
    return f"{figure} {100 * (row.gbps / row.published_gbps - 1):+.0f}%"


def run_text(outcome: RunForecast, seed: int, wall_s: float) -> str:
    blocks = [
        _run_headline(outcome),
        table([RUN_HEADINGS, *map(_island_cells, outcome.islands)]),
        _run_faults(outcome),
        [line for warning in outcome.warnings for line in wrap(f"warning: {warning}", COLUMNS)],
        wrap(
            f"seed {seed}, simulated in {format_duration(wall_s)}. Goodput: tokens merged over what islands "
            "would have processed undisturbed. Refused offers were mostly superseded by a newer one of the same "
            "fragment. Nothing was trained.",
            COLUMNS,
        ),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _run_headline(outcome: RunForecast) -> list[str]:
    share = 100 * outcome.tokens / outcome.tokens_target
    how = "finished" if outcome.finished else "so far"
    lines = [
        f"{outcome.name}: {format_duration(outcome.simulated_s)} of virtual time, {outcome.merges} merges, "
        f"{outcome.skips} skipped slots, {outcome.offers_refused} offers refused, {how}",
        f"tokens {format_count(outcome.tokens)} of {format_count(outcome.tokens_target)} ({share:.1f} %), "
        f"{format_count(outcome.tokens_per_s)} tok/s merged, goodput {100 * outcome.goodput:.1f} %, "
        + (f"participation {100 * outcome.participation:.1f} %" if outcome.participation is not None else "no merge"),
    ]
    sent = f"up {format_size(outcome.up_bytes)}, down {format_size(outcome.down_bytes)}, epochs {outcome.epochs}"
    if outcome.days_to_target is not None:
        sent += f"; at this rate the target takes {format_duration(outcome.days_to_target * 86_400)}"
    if outcome.cost_to_target:
        sent += f" and costs {outcome.cost_to_target:,.0f}"
        if outcome.not_charged:
            sent += f", not counting {', '.join(outcome.not_charged)}"
    return [line for text in (*lines, sent) for line in wrap(text, COLUMNS)]


def _island_cells(island: IslandReport) -> tuple[str, ...]:
    return (
        island.name,
        f"{100 * island.goodput:.1f}%",
        format_count(island.tokens_merged),
        format_count(island.tokens_processed),
        str(island.merges),
        format_duration(island.stalled_s) if island.stalled_s else "-",
        format_duration(island.down_s) if island.down_s else "-",
        str(island.incarnations),
        f"{format_size(island.up_bytes)}/{format_size(island.down_bytes)}".replace(" ", ""),
    )


def _run_faults(outcome: RunForecast) -> list[str]:
    if not outcome.log:
        return []
    skipped = sum(bool(fault.skipped) for fault in outcome.faults)
    shown = outcome.log[:MAX_FAULT_LINES]
    lines = [part for line in shown for part in wrap(f"  {line}", COLUMNS, subsequent_indent="    ")]
    more = len(outcome.log) - len(shown)
    head = f"faults and failures: {len(outcome.log)}" + (f", {skipped} skipped by the constraints" if skipped else "")
    return [head, *lines, *([f"  and {more} more"] if more else [])]
