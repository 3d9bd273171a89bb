"""A line chart in Braille characters, for terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

BLANK = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a character: by column, then by row from the top
Point = tuple[float, float]


def line_chart(
    points: Sequence[Point],
    width: int,
    height: int,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    from_zero: bool = False,
) -> list[str]:
    """`height` lines of at most `width` characters: the curve with its highest and lowest value, then the axis with its
    ends. Needs two points that differ in x; `points` are in the order of x."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(0.0 if from_zero else ys[0], *ys), max(ys)
    labels = {0: y_text(high), height - 2: y_text(low)}
    margin = max(map(len, labels.values()))
    columns, rows = width - margin - 1, height - 1
    cells = [[BLANK] * columns for _ in range(rows)]
    right, bottom = 2 * columns - 1, 4 * rows - 1
    scaled = [
        (right * (x - xs[0]) / (xs[-1] - xs[0]), bottom * (high - y) / ((high - low) or 1.0)) for x, y in points
    ]  # fmt: skip
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
