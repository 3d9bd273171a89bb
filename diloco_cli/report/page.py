"""The report as one HTML file, and its pictures: each is a function that draws on axes, so that a page has them one by
one, narrow enough for a phone, and an SVG file all together.

The page has no script and needs nothing from a network; it is light or dark as the reader's system is. All that came
from the bucket is text, and escaped; the page's own policy forbids scripts and requests besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco_cli.errors import escaped
from diloco_cli.events.event import EVENT_KINDS
from diloco_cli.observe.situation import TROUBLE
from diloco_cli.plots import COLOURS, FAINT, FAULT, GRID, INK, Axis, as_html, drawn, set_up, short_number
from diloco_cli.quantities import format_count, format_duration, format_size
from diloco_cli.report.history import RESTART, RunHistory, Stretch, rates, stretches
from diloco_cli.report.numbers import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (4.6, 2.9)  # as wide as a phone's screen shows without shrinking its text
LANE_INCHES = 0.17
STRETCHES = 240  # of a curve; lanes have as many
MAX_MARKED = 60
MARKED = "Vertical lines: faults and takeovers."
LONGEST_LABEL = 24
FEW_POINTS = 60  # so many are drawn as dots
FAULTS = frozenset(kind.name for kind in EVENT_KINDS if kind.fault)
TIMES = ((2 * 86_400.0, 86_400.0, "days"), (2 * 3600.0, 3600.0, "hours"), (300.0, 60.0, "minutes"))
EVENTS_SHOWN = 200
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
CSS = """
:root {--ink: #24292f; --faint: #57606a; --grid: #d8dee4; --paper: #ffffff; --card: #f6f8fa; --good: #1a7f37;
  --bad: #c0392b}
@media (prefers-color-scheme: dark) {:root {--ink: #e6edf3; --faint: #9da7b3; --grid: #3d444d; --paper: #0d1117;
  --card: #161b22; --good: #3fb950; --bad: #ff7b72}}
* {box-sizing: border-box}
body {margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; color-scheme: light dark}
h1 {font-size: 1.5rem; margin: 0 0 .3rem} h2 {font-size: 1.1rem; margin: 1.6rem 0 .5rem}
.state {color: var(--paper); background: var(--good); border-radius: 1rem; padding: .1rem .7rem; font-size: .9rem;
  vertical-align: middle; white-space: nowrap} .state.bad {background: var(--bad)}
p {margin: .2rem 0} .faint, figcaption {color: var(--faint); font-size: .87rem}
.figures {display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .6rem; margin: 1rem 0}
.figures div {background: var(--card); border-radius: .4rem; padding: .5rem .7rem}
.figures b {display: block; font-size: 1.2rem} .figures span {color: var(--faint); font-size: .85rem}
.charts {columns: 29rem; column-gap: 1rem}
figure {margin: 0 0 1rem; break-inside: avoid; background: var(--card); border-radius: .4rem; padding: .7rem}
figure svg {width: 100%; height: auto}
figure h3 {font-size: .98rem; margin: 0}
.wide {overflow-x: auto} table {border-collapse: collapse; font-size: .9rem; min-width: 50%}
th, td {text-align: right; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--grid); vertical-align: top}
th:first-child, td:first-child, .words td, .words th {text-align: left} th {font-weight: 600; color: var(--faint)}
td {white-space: nowrap} .words td {white-space: normal; overflow-wrap: break-word}
summary {cursor: pointer; font-size: 1.1rem; font-weight: 600; margin: 1.6rem 0 .5rem}
code {font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere}
@media print {body {max-width: none} details {display: block}}
"""


# -- the page -----------------------------------------------------------------------------------------------------


def mark_of(run_id: str) -> str:
    """By which a later report knows the page as one of this run."""
    return f'<meta name="diloco-run" content="{run_id}">'


def page_of(report: Report, charts: Sequence[Chart], generated_at: str, run_id: str) -> str:
    title = f"{report.run}: a run of diloco"
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{as_html(title)}</title>',
        mark_of(run_id),
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{CSS}</style></head><body>",
        *_head(report),
        _figures(figures_of(report)),
        '<div class="charts">',
        *(_figure(chart) for chart in charts),
        "</div>",
        *_tables(report),
        f'<p class="faint">Made at {as_html(generated_at)} by diloco from {report.commits:,} commits of '
        f"<code>{as_html(report.url)}</code>; the run was created by diloco {as_html(report.software)}.</p>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _head(report: Report) -> list[str]:
    kind = "state bad" if report.state in TROUBLE else "state"
    reason = f"<p>{as_html(report.reason)}</p>" if report.reason else ""
    hint = f'<p class="faint">hint: <code>{as_html(report.hint)}</code></p>' if report.hint else ""
    when = f"{as_html(_minute(report.started_at))} to {as_html(_minute(report.ended_at))}"
    return [
        f'<h1>{as_html(report.run)} <span class="{kind}">{as_html(report.state)}</span></h1>{reason}{hint}',
        f'<p class="faint">{when} UTC, {format_duration(report.wall_s)}; {report.commits:,} commits</p>',
    ]


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def figures_of(report: Report) -> list[tuple[str, str]]:
    """(what it is, its value) of the numbers that people ask for first."""
    faults, cost = report.faults, report.cost
    moved = report.up_bytes + report.down_bytes
    times = report.data_parallel_bytes / moved if moved else 0.0
    less = f", {times:,.0f} times as many" if times >= 2 else ""
    planned = "" if report.planned_goodput is None else f", planned {100 * report.planned_goodput:.3g}%"
    return [
        ("merged tokens", f"{format_count(report.tokens)} of {format_count(report.tokens_target)}"),
        ("held-out loss, nats per token", _or_unknown(report.loss, ".4f")),
        (
            "mean merged tokens per second",
            "unknown" if report.tokens_per_s is None else format_count(report.tokens_per_s),
        ),
        (f"goodput{planned}", "unknown" if report.goodput is None else f"{100 * report.goodput:.1f}%"),
        (
            f"participation, {_or_unknown(report.participants_mean, '.2f')} learners a merge",
            "unknown" if report.participation is None else f"{100 * report.participation:.1f}%",
        ),
        ("merges", f"{report.merges:,}" + (f" ({report.skips:,} skipped)" if report.skips else "")),
        (
            "faults survived",
            f"{faults.restarts} restart{_s(faults.restarts)}, {faults.takeovers} takeover{_s(faults.takeovers)}"
            + (f", {faults.injected} injected" if faults.injected else "")
            + (f", {faults.rollbacks} rollback{_s(faults.rollbacks)}" if faults.rollbacks else "")
            + (f", {faults.refused_offers} offer{_s(faults.refused_offers)} refused" if faults.refused_offers else ""),
        ),
        (
            "without a merge, longer than usual",
            f"{format_duration(faults.outage_s)} in {faults.outages}" if faults.outages else "never",
        ),
        ("over the links, up and down", format_size(moved)),
        (f"data-parallel training would move{less}", format_size(report.data_parallel_bytes)),
        *([("cost so far, in the inventory's money", f"{cost.total:,.2f}")] if cost is not None else []),
        *([("cost of the plan, to the target", f"{cost.planned:,.2f}")] if cost is not None else []),
    ]


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _or_unknown(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _figures(figures: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<div><b>{as_html(value)}</b><span>{as_html(what)}</span></div>" for what, value in figures)
    return f'<div class="figures">{cells}</div>'


def _figure(chart: Chart) -> str:
    about = f"<figcaption>{as_html(chart.about)}</figcaption>"
    svg = drawn(chart.title, chart.inches, lambda figure: chart.draw(figure.subplots()), whole=False)
    return f"<figure><h3>{as_html(chart.title)}</h3>{svg}{about}</figure>"


def _tables(report: Report) -> list[str]:
    learners = [
        (
            row.name,
            row.region,
            format_count(row.tokens),
            f"{100 * row.share:.1f}%",
            f"{row.merges:,}",
            f"{100 * row.participation:.1f}%",
            str(row.restarts),
            format_size(row.up_bytes),
            format_size(row.down_bytes),
        )
        for row in report.learners
    ]
    regions = [
        (
            row.name,
            str(row.learners),
            format_count(row.tokens),
            format_size(row.up_bytes),
            format_size(row.down_bytes),
            format_size(row.mirrored_bytes),
            f"{row.accelerators:,.2f}",
            f"{row.egress:,.2f}",
        )
        for row in report.regions
    ]
    jobs = [(job.unit, job.engine, job.id, job.state) for job in report.jobs]  # no hosts and logs: it is shown around
    events = [
        (format_duration(mark.s), mark.unit, mark.kind, mark.text) for mark in reversed(report.events[-EVENTS_SHOWN:])
    ]
    left_out = report.events_left_out + max(0, len(report.events) - EVENTS_SHOWN)
    about = f"Events ({left_out:,} older ones left out)" if left_out else "Events"
    settings = [(setting.name, setting.value, setting.origin) for setting in report.settings]
    return [
        "<h2>Learners</h2>",
        _table(("learner", "region", "tokens", "share", "merges", "took part", "restarts", "up", "down"), learners),
        "<h2>Regions</h2>",
        _table(("region", "learners", "tokens", "up", "down", "between buckets", "accelerators", "egress"), regions),
        *(["<h2>Jobs</h2>", _table(("unit", "engine", "job", "state"), jobs, "words")] if jobs else []),
        f"<details open><summary>{about}</summary>",
        _table(("after", "unit", "kind", "what"), events, "words"),
        "</details><details><summary>Settings</summary>",
        _table(("setting", "value", "from"), settings, "words"),
        "</details>",
    ]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{as_html(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{as_html(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


# -- the pictures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """`about`: the sentence below it."""

    title: str
    about: str
    draw: Callable[[Axes], None]
    inches: tuple[float, float] = INCHES


def charts_of(report: Report, history: RunHistory) -> list[Chart]:
    """Those that this run has something for."""
    pictures, found = Pictures(report, history), []
    if history.losses:
        found += [
            Chart("Loss over tokens", "Held-out loss of the outer parameters.", pictures.loss_over_tokens),
            Chart("Loss over time", f"The same. {MARKED}", pictures.loss_over_time),
        ]
    if history.merges:
        lanes = (INCHES[0], 1.1 + LANE_INCHES * max(4, len(report.learners)))
        shades = "Fuller colour: took part in more of the merges. Triangles: restarts."
        found += [
            Chart("Merged tokens per second", MARKED, pictures.rate),
            Chart("Participants per merge", "Mean, and fewest (shaded).", pictures.participants),
            Chart("Learners", shades, pictures.lanes, lanes),
        ]
    if report.planned or report.measured:
        about = "From planned speeds to merged tokens: as predicted, and as it was."
        found.append(Chart("Where the tokens went", about, pictures.waterfall, (INCHES[0], 3.4)))
    if any(region.up_bytes or region.down_bytes for region in report.regions):
        about = "Over the learners' links; money is the inventory's price of leaving the region."
        found.append(Chart("Bytes by region", about, pictures.bytes, (INCHES[0], 1.5 + 0.35 * len(report.regions))))
    return found


def poster_svg(report: Report, charts: Sequence[Chart]) -> str:
    """All of them as one document, two beside each other."""
    rows = [charts[start : start + 2] for start in range(0, len(charts), 2)]
    heights = [max(chart.inches[1] for chart in row) for row in rows]
    loss = "" if report.loss is None else f", loss {report.loss:.3f}"
    title = escaped(f"{report.run}: {report.state}, {format_count(report.tokens)} tokens{loss}")

    def draw(figure: Figure) -> None:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        grid = figure.add_gridspec(len(rows), 2, height_ratios=heights)
        for number, chart in enumerate(charts):
            alone = len(rows[number // 2]) == 1
            axes = figure.add_subplot(grid[number // 2, :] if alone else grid[number // 2, number % 2])
            axes.set_title(chart.title)
            chart.draw(axes)

    return drawn(title, (2 * INCHES[0], sum(heights) + 0.5), draw)


class Pictures:
    """What each chart draws on its axes. Time is in a unit that suits the run's length."""

    def __init__(self, report: Report, history: RunHistory) -> None:
        self.report, self.history = report, history
        found = ((unit_s, name) for least_s, unit_s, name in TIMES if history.span_s >= least_s)
        self.unit_s, name = next(found, (1.0, "seconds"))
        self.time = Axis(f"{name} since the first commit", low=0.0)

    def at(self, seconds: Sequence[float]) -> list[float]:
        return [s / self.unit_s for s in seconds]

    def loss_over_tokens(self, axes: Axes) -> None:
        losses = self.history.losses
        _line(axes, [point.tokens for point in losses], [point.loss for point in losses])
        set_up(axes, Axis("merged tokens", low=0.0), Axis("nats per token"))

    def loss_over_time(self, axes: Axes) -> None:
        losses = self.history.losses
        self.mark(axes)
        _line(axes, self.at([point.s for point in losses]), [point.loss for point in losses])
        set_up(axes, self.time, Axis("nats per token"))

    def mark(self, axes: Axes) -> None:
        faults = [mark for mark in self.report.events if mark.kind in FAULTS and mark.s > 0]
        if len(faults) > MAX_MARKED:  # so many restarts would hide the curve; the lanes have them
            faults = [mark for mark in faults if mark.kind != RESTART][-MAX_MARKED:]
        for at in self.at([mark.s for mark in faults]):
            axes.axvline(at, color=FAULT, alpha=0.6, linewidth=0.9)

    def rate(self, axes: Axes) -> None:
        self.mark(axes)
        found = rates(self.history, STRETCHES)
        axes.plot(self.at([s for s, _ in found]), [rate for _, rate in found], color=COLOURS[0], label="merged")
        if self.report.planned_tokens_per_s:
            axes.axhline(self.report.planned_tokens_per_s, color=COLOURS[1], linestyle="--", label="planned")
            axes.legend(loc="lower right")
        set_up(axes, self.time, Axis("tokens per second", low=0.0))

    def participants(self, axes: Axes) -> None:
        self.mark(axes)
        parts = [stretch for stretch in stretches(self.history, STRETCHES) if stretch.merges]
        at = self.at([(part.start_s + part.end_s) / 2 for part in parts])
        mean = [part.participants / part.merges for part in parts]
        axes.fill_between(at, [part.fewest for part in parts], mean, color=COLOURS[0], alpha=0.2, linewidth=0)
        axes.plot(at, mean, color=COLOURS[0], label="took part")
        alive = [part.alive / part.merges for part in parts]
        axes.plot(at, alive, color=COLOURS[1], linestyle="--", linewidth=1, label="alive")
        axes.legend(loc="lower right")
        set_up(axes, self.time, Axis("learners", low=0.0, high=max([*alive, *mean]) * 1.08))
        axes.locator_params(axis="y", integer=True)

    def lanes(self, axes: Axes) -> None:
        from matplotlib.colors import to_rgb

        learners, parts = self.report.learners, stretches(self.history, STRETCHES)
        names, regions = [learner.name for learner in learners], [region.name for region in self.report.regions]
        colours = [to_rgb(COLOURS[regions.index(learner.region) % len(COLOURS)]) for learner in learners]
        image = [[(*colour, _shade(part, name)) for part in parts] for name, colour in zip(names, colours, strict=True)]
        end = self.at([parts[-1].end_s])[0]
        axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, end, len(names) - 0.5, -0.5))
        restarts = [mark for mark in self.report.events if mark.unit in names and mark.kind == RESTART]
        rows = [names.index(mark.unit) for mark in restarts]
        at = self.at([mark.s for mark in restarts])
        axes.scatter(at, rows, marker="v", s=30, color=INK, linewidths=0, zorder=3)  # seen on every colour
        set_up(axes, Axis(self.time.label, low=0.0, high=end), Axis(""))
        axes.set_yticks(range(len(names)), [cut(name) for name in names], fontsize=8)
        axes.grid(visible=False)
        axes.hlines([row + 0.5 for row in range(len(names) - 1)], 0, end, color=GRID, linewidth=0.7)

    def waterfall(self, axes: Axes) -> None:
        rows = [(f"plan: {stage.name}", stage.tokens_per_s, COLOURS[1]) for stage in self.report.planned]
        rows += [(f"run: {stage.name}", stage.tokens_per_s, COLOURS[0]) for stage in self.report.measured]
        names, values, colours = zip(*rows, strict=True)
        bars = axes.barh(range(len(names)), values, color=colours, height=0.62)
        axes.bar_label(bars, [format_count(value) for value in values], fontsize=8, padding=3)
        _rows(axes, names, margin=0.15)
        axes.set_xlabel("tokens per second")
        axes.xaxis.set_major_formatter(lambda value, _: short_number(value))

    def bytes(self, axes: Axes) -> None:
        regions = self.report.regions
        rows, up = range(len(regions)), [float(region.up_bytes) for region in regions]
        axes.barh(rows, up, color=COLOURS[0], height=0.5, label="up")
        down = [float(region.down_bytes) for region in regions]
        bars = axes.barh(rows, down, left=up, color=COLOURS[2], height=0.5, label="down")
        texts = [format_size(r.up_bytes + r.down_bytes) + (f", {r.egress:,.2f}" if r.egress else "") for r in regions]
        axes.bar_label(bars, texts, fontsize=8, color=FAINT, padding=3)
        _rows(axes, [region.name for region in regions], margin=0.3)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: format_size(value) if value else "0")


def cut(name: str) -> str:
    """A label that leaves room for the picture."""
    plain = escaped(name)
    return plain if len(plain) <= LONGEST_LABEL else f"{plain[: LONGEST_LABEL - 1]}…"


def _line(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    axes.plot(x, y, color=COLOURS[0], marker="o" if len(x) <= FEW_POINTS else None, markersize=3)


def _shade(stretch: Stretch, learner: str) -> float:
    took = stretch.by[learner]
    return 0.25 + 0.7 * took / stretch.merges if took else 0.0


def _rows(axes: Axes, names: Sequence[str], margin: float) -> None:
    """Names of horizontal bars, the first on top."""
    axes.set_yticks(range(len(names)), [cut(name) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=margin)
