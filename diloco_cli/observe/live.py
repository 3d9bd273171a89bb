"""The live screen of a run: status, the curve of losses and the pace, in as many lines as the terminal has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from diloco_cli.errors import escaped
from diloco_cli.observe.screen import cut, head_lines, lines_of, recent_lines, rest_lines, styled, unit_table
from diloco_cli.observe.status import Status, rate_between
from diloco_cli.observe.unit_states import BAD
from diloco_cli.protocol.log.metrics import Metrics, thinned
from diloco_cli.units import format_count

MAX_POINTS = 512
SMALLEST_CHART, HIGHEST_CHART = 4, 10
FEWEST_EVENTS = 3  # with their heading
GAP = "   "
CURVE, AXIS = "cyan", r"[^ ]*[┤│]"
BLANK = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a character: by column, then by row from the top
Point = tuple[float, float]


class Curves:
    """The curves of one watched run, bounded. The log's state has the losses of the whole run, but only its newest
    merges: the pace is kept since the watch began, thinned like the losses."""

    def __init__(self) -> None:
        self.losses: list[Point] = []
        self.rates: list[Point] = []
        self._seen = -1

    def add(self, metrics: Metrics) -> None:
        self.losses = [(float(tokens), loss) for tokens, loss in metrics.losses]
        merges = metrics.recent_merges
        if not merges or merges[-1].n <= self._seen:
            return
        self._seen = merges[-1].n
        rate, tokens = rate_between(merges[0], merges[-1]), float(merges[-1].tokens)
        self.rates = [point for point in self.rates if point[0] < tokens]  # a rollback goes back
        if rate is not None:
            self.rates.append((tokens, rate))
        self.rates = thinned(self.rates, MAX_POINTS, lambda point: point[0])


@dataclass(frozen=True)
class LiveScreen:
    """Fits whatever size the terminal has when it is drawn. `trouble`: why the status is not newer."""

    status: Status
    curves: Curves
    trouble: str = ""
    max_lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.max_height if self.max_lines is None else min(self.max_lines, options.max_height)
        trouble = lines_of([cut(escaped(self.trouble), options.max_width)], BAD) if self.trouble else []
        lines = live_lines(self.status, self.curves, options.max_width, height - len(trouble))
        yield styled([*trouble, *lines])


def live_lines(status: Status, curves: Curves, width: int, height: int) -> list[Text]:
    """At most `height` lines. The verdict comes first; then curves, units and events share what is left."""
    head = head_lines(status, width)[: max(3, height // 3)]
    rest = rest_lines(status, width)
    left = height - len(head)
    charts = chart_lines(curves, width, min(HIGHEST_CHART, left // 3))
    left -= len(charts)
    units = _units(status, width, left - min(left // 3, FEWEST_EVENTS))
    left -= len(units)
    rest = rest[: max(0, left - (FEWEST_EVENTS if status.recent else 0))]
    left -= len(rest)
    events = recent_lines(status, None, left - 1)
    for line in events:
        line.truncate(width, overflow="ellipsis")
    return [*head, *charts, *units, *rest, *events][:height]


def _units(status: Status, width: int, room: int) -> list[Text]:
    """The table with as many learners as there is room for."""
    others = 2 + len(status.standbys)  # the heading, and the syncer
    found = unit_table(status, width)
    if len(found) > room:
        found = unit_table(status, width, max(1, room - others))
    return found[:room]


def chart_lines(curves: Curves, width: int, height: int) -> list[Text]:
    """The loss and the pace beside each other, by merged tokens; nothing where there is no curve yet, or no room."""
    if height < SMALLEST_CHART:
        return []
    half = (width - len(GAP)) // 2
    left = _chart("held-out loss by merged tokens", curves.losses, half, height, "{:.2f}".format, False)
    right = _chart("merged tok/s by merged tokens", curves.rates, half, height, format_count, True)
    if not left and not right:
        return []
    known = f"{curves.losses[-1][1]:.3f} (one so far)" if curves.losses else "not evaluated yet"
    left = left or [f"held-out loss: {known}"[:half]] + [""] * (height - 1)
    right = right or ["merged tok/s: more is to come"[:half]] + [""] * (height - 1)
    lines = [f"{one:<{half}}{GAP}{other}".rstrip() for one, other in zip(left, right, strict=True)]
    drawn = lines_of(lines[1:], CURVE)
    for line in drawn:
        line.highlight_regex(AXIS, "default")
    return [Text(lines[0], "bold"), *drawn]


def _chart(
    title: str, points: Sequence[Point], width: int, height: int, y_text: Callable[[float], str], from_zero: bool
) -> list[str]:
    if len(points) < 2 or points[0][0] >= points[-1][0]:
        return []
    return [title[:width], *line_chart(points, width, height - 1, format_count, y_text, from_zero)]


def line_chart(
    points: Sequence[Point],
    width: int,
    height: int,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    from_zero: bool = False,
) -> list[str]:
    """`height` lines of at most `width` Braille characters: the curve with its highest and lowest value, then the axis
    with its ends. Needs two points that differ in x; `points` are in the order of x."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(0.0 if from_zero else ys[0], *ys), max(ys)
    labels = {0: y_text(high), height - 2: y_text(low)}
    margin = max(map(len, labels.values()))
    columns, rows = width - margin - 1, height - 1
    cells = [[BLANK] * columns for _ in range(rows)]
    right, bottom = 2 * columns - 1, 4 * rows - 1
    x_scale, y_scale = right / (xs[-1] - xs[0]), bottom / ((high - low) or 1.0)
    scaled = [(x_scale * (x - xs[0]), y_scale * (high - y)) for x, y in points]
    for x, y in _joined(scaled):
        cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
    lines = [
        f"{labels.get(row, ''):>{margin}}{'┤' if row in labels else '│'}"
        + "".join(map(chr, line)).replace(chr(BLANK), " ").rstrip()
        for row, line in enumerate(cells)
    ]
    first, last = x_text(xs[0]), x_text(xs[-1])
    return [*lines, f"{'':>{margin}} {first}{last:>{max(0, columns - len(first))}}"]


def _joined(points: Sequence[Point]) -> Iterator[tuple[int, int]]:
    """Every dot on the lines from one point to the next."""
    for (x0, y0), (x1, y1) in pairwise(points):
        steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for step in range(steps + 1):
            yield round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)
