"""Pictures: well-formed, with every label, and the points where they belong."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from diloco_cli.errors import UsageError
from diloco_cli.plots import LEFT, RIGHT, WIDTH, Axis, Series, bar_chart, line_chart, save_svg, short_number

SVG = "{http://www.w3.org/2000/svg}"


def test_a_logarithmic_axis_puts_the_geometric_middle_in_the_middle() -> None:
    line = Series("a < b", ((1.0, 0.0), (10.0, 5.0), (100.0, 10.0)))
    root = ElementTree.fromstring(line_chart("title & more", Axis("x", log=True), Axis("y"), [line]))
    dots = [float(dot.attrib["cx"]) for dot in root.iter(f"{SVG}circle")]
    assert dots == pytest.approx([LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT], abs=0.1)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"title & more", "a < b", "x", "y"} <= set(texts)


def test_bars_are_as_long_as_their_values() -> None:
    root = ElementTree.fromstring(bar_chart("t", [("whole", 4.0, "4"), ("half", 2.0, "2")]))
    widths = [float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.1)


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="logarithmic"):
        line_chart("t", Axis("x", log=True), Axis("y"), [Series("a", ((0.0, 1.0),))])
    with pytest.raises(ValueError, match="nothing"):
        line_chart("t", Axis("x"), Axis("y"), [])
    with pytest.raises(UsageError, match="SVG"):
        save_svg("<svg/>", tmp_path / "a.png")
    with pytest.raises(UsageError, match="cannot write"):
        save_svg("<svg/>", tmp_path / "missing" / "a.svg")


def test_numbers_on_axes_are_short() -> None:
    assert [short_number(value) for value in (0.25, 100, 10_000, 2_500_000)] == ["0.25", "100", "10k", "2.5M"]


def test_a_line_without_a_label_is_not_in_the_legend_and_may_share_a_colour() -> None:
    lines = [Series("ours", ((1, 1), (2, 2)), colour=3), Series("", ((1, 2), (2, 1)), dashed=True, colour=3)]
    root = ElementTree.fromstring(line_chart("t", Axis("x"), Axis("y"), lines))
    drawn = list(root.iter(f"{SVG}polyline"))
    assert drawn[0].attrib["stroke"] == drawn[1].attrib["stroke"]
    assert [text.text for text in root.iter(f"{SVG}text")].count("") == 0


@pytest.mark.parametrize(
    ("low", "high", "first", "last"), [(150_000, 2_400_000, "100k", "5M"), (1, 1000, "1", "1k"), (3, 3, "1", "10")]
)
def test_a_logarithmic_axis_ends_at_round_numbers(low: float, high: float, first: str, last: str) -> None:
    root = ElementTree.fromstring(line_chart("t", Axis("x", log=True), Axis("y"), [Series("a", ((low, 0), (high, 1)))]))
    middle = [t.text for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "middle"]
    ticks = [text for text in middle if text and text[0].isdigit()]
    assert (ticks[0], ticks[-1]) == (first, last)
