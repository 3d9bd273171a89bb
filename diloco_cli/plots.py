"""Pictures as SVG that follows the page, or the reader's system, into light and dark.

Drawn by matplotlib, an extra of 100 MB for those who want pictures; importing it takes half a second. A drawing
has stand-ins for the colours of text and lines; the document names variables in their place, which a page may set.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_cli.errors import UsageError, escaped
from diloco_cli.paths import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2f6fde", "#d95f02", "#1b9e77", "#a0459b", "#6b7280", "#b8860b", "#0e7490", "#c2185b")
FAULT = "#d1453b"
INK, FAINT, GRID = "#010203", "#040506", "#070809"
PAGE = {INK: "var(--ink, #24292f)", FAINT: "var(--faint, #57606a)", GRID: "var(--grid, #d8dee4)"}
ALONE = (  # with a ground of its own: the page around a picture may be light where the system is dark
    "<style>svg {background: #ffffff} @media (prefers-color-scheme: dark) {svg {background: #0d1117; --ink: #e6edf3;"
    " --faint: #9da7b3; --grid: #3d444d}}</style>"
)
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "diloco",
    "text.parse_math": False,
    "font.size": 10,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.titlecolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.7,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "axes.formatter.useoffset": False,
}
_FONT = "font-family: 'DejaVu Sans', sans-serif"
_GROUP = re.compile(r'<g id="[^"]*"')


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


@dataclass(frozen=True)
class Panel:
    """Points (x, y, text), and a line below which none of those to its left is."""

    y: Axis
    points: tuple[tuple[float, float, str], ...]


def drawn(title: str, inches: tuple[float, float], draw: Callable[[Figure], None], whole: bool = True) -> str:
    """The SVG of what `draw` draws on an empty figure: a whole document, or (not `whole`) an element of a page, which
    sets the colours. Raises UsageError where matplotlib is not installed."""
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=inches)
        draw(figure)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _for_pages(stream.getvalue(), title, whole)


def require_matplotlib() -> None:
    """Raises UsageError where it is not installed."""
    if find_spec("matplotlib") is None:
        raise UsageError("pictures are drawn by matplotlib, which is not installed", hint=install_hint("report"))


def as_html(text: str) -> str:
    """Text of a bucket as a page may show it: no markup, and nothing that controls a terminal or turns lines around."""
    return escape(escaped(text))


def _for_pages(svg: str, title: str, whole: bool) -> str:
    svg = svg[svg.index("<svg ") :]
    for stand_in, colour in PAGE.items():
        svg = svg.replace(stand_in, colour)
    svg = svg.replace(_FONT, "font-family: system-ui, sans-serif")
    svg = _GROUP.sub("<g", svg)  # ids that nothing refers to, and that a page would have many times
    head, _, rest = svg.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    style = ALONE if whole else ""
    return f'{head} role="img"><title>{as_html(title)}</title>{style}{rest}'


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """An SVG document."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_title(title)
        for number, line in enumerate(series):
            colour = COLOURS[(number if line.colour is None else line.colour) % len(COLOURS)]
            style = {"linestyle": "--"} if line.dashed else {"marker": "o", "markersize": 3.5}
            axes.plot(*zip(*line.points, strict=True), color=colour, label=line.label or "_", **style)
        set_up(axes, x, y)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return drawn(title, (7.6, 4.4), draw)


def panels_chart(title: str, x: Axis, panels: Sequence[Panel]) -> str:
    """An SVG document: panels below each other over the same x; a point has the same colour in all of them."""

    def draw(figure: Figure) -> None:
        rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(rows, panels, strict=True):
            xs, ys, texts = zip(*panel.points, strict=True)
            lowest = list(accumulate(ys, min))
            axes.step(xs, lowest, where="post", color=FAINT, linewidth=0.9, linestyle="--")
            axes.scatter(xs, ys, color=[COLOURS[n % len(COLOURS)] for n in range(len(xs))], s=36, zorder=3)
            for place, text in zip(zip(xs, ys, strict=True), texts, strict=True):
                axes.annotate(text, place, xytext=(6, 5), textcoords="offset points", fontsize=9)
            axes.margins(x=0.12, y=0.2)
            set_up(axes, Axis("", x.log), panel.y)
        rows[0].set_title(title)
        rows[-1].set_xlabel(x.label)

    return drawn(title, (7.6, 1.0 + 2.6 * len(panels)), draw)


def bar_chart(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars from zero: (label, value, value as text), the first on top."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_title(title)
        names = range(len(bars))
        shown = axes.barh(names, [max(0.0, value) for _, value, _ in bars], color=COLOURS, height=0.6)
        axes.bar_label(shown, [text for _, _, text in bars], padding=3)
        axes.set_yticks(names, [label for label, _, _ in bars])
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.grid(visible=False)
        axes.margins(x=0.25)

    return drawn(title, (7.6, 0.9 + 0.3 * len(bars)), draw)


def set_up(axes: Axes, x: Axis, y: Axis) -> None:
    """Labels, limits, and numbers as people write them."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(xlabel=x.label, ylabel=y.label, xscale="log" if x.log else "linear", yscale="log" if y.log else "linear")
    axes.set_xlim(x.low, x.high)
    axes.set_ylim(y.low, y.high)
    for axis, is_log in ((axes.xaxis, x.log), (axes.yaxis, y.log)):
        if is_log:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: short_number(value))


def short_number(value: float) -> str:
    """10000 -> '10k', 2500000 -> '2.5M', 0.25 -> '0.25'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.6g}"


def save_svg(path: Path, picture: Callable[[], str]) -> None:
    """Raises UsageError for another kind of file, before it is drawn, or where it cannot be written."""
    if path.suffix.lower() != ".svg":
        raise UsageError("plots are written as SVG", where=str(path), hint=f"--plot {path.with_suffix('.svg')}")
    try:
        path.write_text(picture(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the plot: {(error.strerror or str(error)).lower()}", where=str(path)) from None
