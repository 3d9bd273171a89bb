"""Pictures without a plotting library: self-contained SVG, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from diloco_cli.errors import UsageError

COLOURS = ("#2f6fde", "#d95f02", "#1b9e77", "#a0459b", "#6b7280", "#b8860b", "#0e7490", "#c2185b")
WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 72, 190, 48, 56  # margins; the legend stands on the right
BAR_HEIGHT, BAR_LEFT = 30, 190
NUM_TICKS = 6


@dataclass(frozen=True)
class Series:
    """One line: (x, y) points in the order in which they are joined. `dashed`: to set a reference apart. `colour`: a
    number from 0; None: the next one. Without a label it is not in the legend."""

    label: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    colour: int | None = None


@dataclass(frozen=True)
class Axis:
    """`low` and `high` None: from the data. Logarithmic axes need values above 0."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """An SVG document. Raises ValueError without a point, or with one that a logarithmic axis cannot show."""
    x_scale = _Scale.of(x, [point[0] for line in series for point in line.points], LEFT, WIDTH - RIGHT)
    y_scale = _Scale.of(y, [point[1] for line in series for point in line.points], HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x_scale, y_scale), *_axis_labels(x, y)]
    shown = 0
    for number, line in enumerate(series):
        colour = COLOURS[(number if line.colour is None else line.colour) % len(COLOURS)]
        parts += _line(line, x_scale, y_scale, colour)
        if line.label:
            parts += _legend(line, shown, colour)
            shown += 1
    return _document(title, HEIGHT, parts)


def bar_chart(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars from zero: (label, value, value as text), the first on top."""
    height = TOP + BAR_HEIGHT * len(bars) + 24
    longest = max((value for _, value, _ in bars), default=0.0) or 1.0
    room = WIDTH - BAR_LEFT - 130
    parts = []
    for number, (label, value, text) in enumerate(bars):
        top = TOP + number * BAR_HEIGHT
        length = room * max(0.0, value) / longest
        parts.append(_text(BAR_LEFT - 10, top + 19, label, "end"))
        parts.append(
            f'<rect x="{BAR_LEFT}" y="{top + 5}" width="{length:.1f}" height="{BAR_HEIGHT - 10}" '
            f'fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        parts.append(_text(BAR_LEFT + length + 8, top + 19, text, "start"))
    return _document(title, height, parts)


def save_svg(svg: str, path: Path) -> None:
    """Raises UsageError for another kind of file, or where it cannot be written."""
    if path.suffix.lower() != ".svg":
        raise UsageError("plots are written as SVG", where=str(path), hint=f"--plot {path.with_suffix('.svg')}")
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the plot: {(error.strerror or str(error)).lower()}", where=str(path)) from None


@dataclass(frozen=True)
class _Scale:
    """From values to pixels. `ticks` are the values that get a grid line."""

    low: float
    high: float
    log: bool
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
        if not values:
            raise ValueError("nothing to plot")
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if axis.log and low <= 0:
            raise ValueError(f"a logarithmic axis cannot show {low:g}")
        if high <= low:
            low, high = (low / 2, low * 2) if axis.log else (low - 0.5, low + 0.5)
        ticks = _log_ticks(low, high) if axis.log else _linear_ticks(low, high)
        return cls(min(low, ticks[0]), max(high, ticks[-1]), axis.log, start, end, ticks)

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def _linear_ticks(low: float, high: float) -> tuple[float, ...]:
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((m for m in (1, 2, 5, 10) if m * power >= rough), default=10)
    first = math.floor(low / step + 1e-9)
    return tuple(k * step for k in range(first, math.ceil(high / step - 1e-9) + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten; over less than two of them also their doubles and fives. From the last one not above `low` to the
    first one not below `high`."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    begin = max(index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    end = min(index for index, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
    return tuple(ticks[begin : max(end, begin + 1) + 1])


def _grid(x: _Scale, y: _Scale) -> list[str]:
    parts = []
    for value in x.ticks:
        at = x.at(value)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#8883" />')
        parts.append(_text(at, HEIGHT - BOTTOM + 18, short_number(value), "middle"))
    for value in y.ticks:
        at = y.at(value)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#8883" />')
        parts.append(_text(LEFT - 8, at + 4, short_number(value), "end"))
    return parts


def _axis_labels(x: Axis, y: Axis) -> list[str]:
    across, middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    turned = f'<g transform="translate(20 {middle:.0f}) rotate(-90)">{_text(0, 0, y.label, "middle")}</g>'
    return [_text(across, HEIGHT - 14, x.label, "middle"), turned]


def _line(line: Series, x: _Scale, y: _Scale, colour: str) -> list[str]:
    places = [(x.at(a), y.at(b)) for a, b in line.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    dash = ' stroke-dasharray="6 5"' if line.dashed else ""
    dots = [] if line.dashed else [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>', *dots]


def _legend(line: Series, number: int, colour: str) -> list[str]:
    left, at = WIDTH - RIGHT + 16, TOP + 10 + 22 * number
    dash = ' stroke-dasharray="6 5"' if line.dashed else ""
    mark = f'<path d="M{left} {at}h22" stroke="{colour}" stroke-width="3"{dash}/>'
    return [mark, _text(left + 30, at + 4, line.label, "start")]


def short_number(value: float) -> str:
    """10000 -> '10k', 2500000 -> '2.5M', 0.25 -> '0.25'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.6g}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _document(title: str, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#6b7280">'
    )
    heading = f'<text x="{LEFT}" y="26" font-size="15" font-weight="600">{escape(title)}</text>'
    return "\n".join([head, f"<title>{escape(title)}</title>", heading, *parts, "</svg>"]) + "\n"
