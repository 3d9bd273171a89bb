"""Pictures: well-formed, with every label, in colours that the page or the system gives."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from diloco_cli.errors import UsageError
from diloco_cli.paths import install_hint
from diloco_cli.plots import Axis, Series, bar_chart, line_chart, save_svg, short_number

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> set[str | None]:
    return {text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}


def test_a_chart_has_its_title_its_labels_and_short_numbers() -> None:
    pytest.importorskip("matplotlib")
    line = Series("a < b", ((1_000.0, 0.0), (10_000.0, 5.0), (100_000.0, 10.0)))
    svg = line_chart("title & more", Axis("x", log=True), Axis("y"), [line])
    found = texts(svg)
    assert {"title & more", "a < b", "x", "y", "2k", "10k", "50k"} <= found
    assert not any("math" in text or "$" in text for text in found if text)


def test_text_is_text_whatever_it_looks_like() -> None:
    """Not markup, and no formula, which would be an error."""
    pytest.importorskip("matplotlib")
    assert "$\\frac{ </text><script>" in texts(bar_chart("t", [("$\\frac{ </text><script>", 1.0, "1")]))


def test_a_picture_is_the_same_each_time_and_follows_the_system_into_the_dark() -> None:
    pytest.importorskip("matplotlib")
    first, second = (bar_chart("t", [("whole", 4.0, "4"), ("half", 2.0, "2")]) for _ in range(2))
    assert first == second and "prefers-color-scheme: dark" in first and "var(--ink" in first


def test_a_line_without_a_label_is_not_in_the_legend() -> None:
    pytest.importorskip("matplotlib")
    lines = [Series("ours", ((1, 1), (2, 2)), colour=3), Series("", ((1, 2), (2, 1)), dashed=True, colour=3)]
    assert "ours" in (found := texts(line_chart("t", Axis("x"), Axis("y"), lines))) and not found & {"", "_"}


def test_without_matplotlib_the_error_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        bar_chart("t", [("a", 1.0, "1")])
    assert caught.value.hint == install_hint("report")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SVG"):
        save_svg(tmp_path / "a.png", lambda: pytest.fail("it is not even drawn"))
    with pytest.raises(UsageError, match="cannot write"):
        save_svg(tmp_path / "missing" / "a.svg", lambda: "<svg/>")


def test_numbers_on_axes_are_short() -> None:
    assert [short_number(value) for value in (0.25, 100, 10_000, 2_500_000)] == ["0.25", "100", "10k", "2.5M"]
