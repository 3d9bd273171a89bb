"""The pictures of a report: each a function that draws on axes, so that a page has them one by one, narrow enough for a
phone, and an SVG file all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco_cli.events.event import EVENT_KINDS
from diloco_cli.plots import COLOURS, FAINT, FAULT, GRID, Axis, drawn, set_up, short_number
from diloco_cli.report.history import RESTART, Bin, RunHistory, rates, stretches
from diloco_cli.report.numbers import Report
from diloco_cli.units import format_count, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (4.6, 2.9)  # as wide as a phone's screen shows without shrinking its text
LANE_INCHES = 0.17
STRETCHES = 240  # of a curve; lanes have as many
MAX_MARKED = 60
LONGEST_LABEL = 24
FEW_POINTS = 60  # so many are drawn as dots
FAULTS = frozenset(kind.name for kind in EVENT_KINDS if kind.fault)
TIMES = ((2 * 86_400.0, 86_400.0, "days"), (2 * 3600.0, 3600.0, "hours"), (300.0, 60.0, "minutes"))


@dataclass(frozen=True)
class Chart:
    """`about`: the sentence below it."""

    title: str
    about: str
    draw: Callable[[Axes], None]
    inches: tuple[float, float] = INCHES


@dataclass(frozen=True)
class TimeUnit:
    """Seconds of the run in a unit that its axis can bear."""

    unit_s: float
    name: str

    @classmethod
    def of(cls, history: RunHistory) -> TimeUnit:
        return next((cls(unit, name) for least, unit, name in TIMES if history.span_s >= least), cls(1.0, "seconds"))

    @property
    def axis(self) -> Axis:
        return Axis(f"{self.name} since the first commit", low=0.0)

    def at(self, seconds: Sequence[float]) -> list[float]:
        return [s / self.unit_s for s in seconds]


def charts_of(report: Report, history: RunHistory) -> list[Chart]:
    """Those that this run has something for."""
    clock, found = TimeUnit.of(history), []
    if history.losses:
        found += [
            Chart("Loss over tokens", "Held-out loss of the outer parameters.", _loss_over_tokens(history)),
            Chart("Loss over time", f"The same. {MARKED}", _loss_over_time(report, history, clock)),
        ]
    if history.merges:
        found += [
            Chart("Merged tokens per second", MARKED, _rate(report, history, clock)),
            Chart("Participants per merge", "Mean, and fewest (shaded).", _participants(report, history, clock)),
            Chart(
                "Learners", "Fuller colour: took part in more of the merges. Triangles: restarts.",
                _lanes(report, history, clock), (INCHES[0], 1.1 + LANE_INCHES * max(4, len(report.learners))),
            ),
        ]  # fmt: skip
    if report.planned or report.measured:
        about = "From planned speeds to merged tokens: as predicted, and as it was."
        found.append(Chart("Where the tokens went", about, _waterfall(report), (INCHES[0], 3.4)))
    if any(region.up_bytes or region.down_bytes for region in report.regions):
        about = "Over the learners' links; money is the inventory's price of leaving the region."
        inches = (INCHES[0], 1.5 + 0.35 * len(report.regions))
        found.append(Chart("Bytes by region", about, _bytes(report), inches))
    return found


MARKED = "Vertical lines: faults and takeovers."


def page_svg(chart: Chart) -> str:
    """As an element of a page."""
    return drawn(chart.title, chart.inches, lambda figure: chart.draw(figure.subplots()), whole=False)


def poster_svg(report: Report, charts: Sequence[Chart]) -> str:
    """All of them as one document, two beside each other."""
    rows = [charts[start : start + 2] for start in range(0, len(charts), 2)]
    heights = [max(chart.inches[1] for chart in row) for row in rows]

    def draw(figure: Figure) -> None:
        figure.suptitle(headline(report), fontsize=12, x=0.01, ha="left")
        grid = figure.add_gridspec(len(rows), 2, height_ratios=heights)
        for number, chart in enumerate(charts):
            alone = len(rows[number // 2]) == 1
            axes = figure.add_subplot(grid[number // 2, :] if alone else grid[number // 2, number % 2])
            axes.set_title(chart.title)
            chart.draw(axes)

    return drawn(headline(report), (2 * INCHES[0], sum(heights) + 0.5), draw)


def headline(report: Report) -> str:
    loss = "" if report.loss is None else f", loss {report.loss:.3f}"
    return f"{report.run}: {report.state}, {format_count(report.tokens)} tokens{loss}"


def cut(name: str) -> str:
    """A label that leaves room for the picture."""
    return name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"


def _loss_over_tokens(history: RunHistory) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        _line(axes, [p.tokens for p in history.losses], [p.loss for p in history.losses])
        set_up(axes, Axis("merged tokens", low=0.0), Axis("nats per token"))

    return draw


def _loss_over_time(report: Report, history: RunHistory, clock: TimeUnit) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        _mark(axes, report, clock)
        _line(axes, clock.at([p.s for p in history.losses]), [p.loss for p in history.losses])
        set_up(axes, clock.axis, Axis("nats per token"))

    return draw


def _line(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    axes.plot(x, y, color=COLOURS[0], marker="o" if len(x) <= FEW_POINTS else None, markersize=3)


def _mark(axes: Axes, report: Report, clock: TimeUnit) -> None:
    faults = [mark for mark in report.events if mark.kind in FAULTS and mark.s > 0]
    if len(faults) > MAX_MARKED:  # so many restarts would hide the curve; the lanes have them
        faults = [mark for mark in faults if mark.kind != RESTART][-MAX_MARKED:]
    for at in clock.at([mark.s for mark in faults]):
        axes.axvline(at, color=FAULT, alpha=0.6, linewidth=0.9)


def _rate(report: Report, history: RunHistory, clock: TimeUnit) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        _mark(axes, report, clock)
        found = rates(history, STRETCHES)
        axes.plot(clock.at([s for s, _ in found]), [rate for _, rate in found], color=COLOURS[0], label="merged")
        if report.planned_tokens_per_s:
            axes.axhline(report.planned_tokens_per_s, color=COLOURS[1], linestyle="--", label="planned")
            axes.legend(loc="lower right")
        set_up(axes, clock.axis, Axis("tokens per second", low=0.0))

    return draw


def _participants(report: Report, history: RunHistory, clock: TimeUnit) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        _mark(axes, report, clock)
        parts = [(start, end, bin_) for start, end, bin_ in stretches(history, STRETCHES) if bin_.merges]
        at = clock.at([(start + end) / 2 for start, end, _ in parts])
        mean = [bin_.participants / bin_.merges for _, _, bin_ in parts]
        axes.fill_between(at, [bin_.fewest for _, _, bin_ in parts], mean, color=COLOURS[0], alpha=0.2, linewidth=0)
        axes.plot(at, mean, color=COLOURS[0], label="took part")
        alive = [bin_.alive / bin_.merges for _, _, bin_ in parts]
        axes.plot(at, alive, color=COLOURS[1], linestyle="--", linewidth=1, label="alive")
        axes.legend(loc="lower right")
        set_up(axes, clock.axis, Axis("learners", low=0.0, high=max([*alive, *mean]) * 1.08))
        axes.locator_params(axis="y", integer=True)

    return draw


def _lanes(report: Report, history: RunHistory, clock: TimeUnit) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        from matplotlib.colors import to_rgb

        parts, names = stretches(history, STRETCHES), [learner.name for learner in report.learners]
        regions = [region.name for region in report.regions]
        colours = [to_rgb(COLOURS[regions.index(learner.region) % len(COLOURS)]) for learner in report.learners]
        image = [
            [(*colour, _shade(bin_, name)) for _, _, bin_ in parts] for name, colour in zip(names, colours, strict=True)
        ]
        end = clock.at([parts[-1][1]])[0]
        axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, end, len(names) - 0.5, -0.5))
        restarts = [
            (mark.s, names.index(mark.unit)) for mark in report.events if mark.unit in names and mark.kind == RESTART
        ]
        at = clock.at([s for s, _ in restarts])
        axes.scatter(at, [row for _, row in restarts], marker="v", s=14, color=FAULT, linewidths=0, zorder=3)
        set_up(axes, Axis(clock.axis.label, low=0.0, high=end), Axis(""))
        axes.set_yticks(range(len(names)), [cut(name) for name in names], fontsize=8)
        axes.grid(visible=False)
        axes.hlines([row + 0.5 for row in range(len(names) - 1)], 0, end, color=GRID, linewidth=0.7)

    return draw


def _shade(bin_: Bin, learner: str) -> float:
    took = bin_.by.get(learner, 0)
    return 0.25 + 0.7 * took / bin_.merges if took else 0.0


def _waterfall(report: Report) -> Callable[[Axes], None]:
    rows = [(f"plan: {stage.name}", stage.tokens_per_s, COLOURS[1]) for stage in report.planned]
    rows += [(f"run: {stage.name}", stage.tokens_per_s, COLOURS[0]) for stage in report.measured]

    def draw(axes: Axes) -> None:
        _bars(axes, [name for name, _, _ in rows], [rate for _, rate, _ in rows], [colour for _, _, colour in rows])

    return draw


def _bars(axes: Axes, names: list[str], values: list[float], colours: list[str]) -> None:
    bars = axes.barh(range(len(names)), values, color=colours, height=0.62)
    axes.bar_label(bars, [format_count(value) for value in values], fontsize=8, padding=3)
    axes.set_yticks(range(len(names)), [cut(name) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)
    axes.set_xlabel("tokens per second")
    axes.xaxis.set_major_formatter(lambda value, _: short_number(value))


def _bytes(report: Report) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        names, rows = [region.name for region in report.regions], range(len(report.regions))
        up, down = ([float(value) for value in values] for values in _traffic(report))
        axes.barh(rows, up, color=COLOURS[0], height=0.5, label="up")
        bars = axes.barh(rows, down, left=up, color=COLOURS[2], height=0.5, label="down")
        texts = [format_size(r.up_bytes + r.down_bytes) + _money(r.egress) for r in report.regions]
        axes.bar_label(bars, texts, fontsize=8, color=FAINT, padding=3)
        axes.set_yticks(rows, [cut(name) for name in names], fontsize=8)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.3)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: format_size(value) if value else "0")

    return draw


def _traffic(report: Report) -> tuple[list[int], list[int]]:
    return [region.up_bytes for region in report.regions], [region.down_bytes for region in report.regions]


def _money(amount: float) -> str:
    return f", {amount:,.2f}" if amount else ""
