"""The screens of `status` and `status --watch`, as golden texts and by what holds at any width.

After a change that is meant, write them anew, and read the difference:

    python -m tests.unit.observe.test_screen"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from diloco_cli.observe.screen import (
    MAX_POINTS,
    STYLE_OF,
    Curves,
    LiveScreen,
    line_chart,
    live_lines,
    plain,
    status_lines,
    status_text,
    styled,
)
from diloco_cli.observe.situation import State
from diloco_cli.observe.status import UnitError
from diloco_cli.observe.summary import LearnerSummary, Summary, SyncerSummary, summary_text
from diloco_cli.observe.unit_states import UNIT_STATES
from diloco_cli.protocol.log.metrics import MergeNote, Metrics
from tests.unit.observe.situations import EU, HEALTHY, IOWA, SITUATIONS, curves, degraded, many

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (80, 100, 140)
SIZES = ((80, 24), (100, 30), (140, 40))
LIVE = {**SITUATIONS, "many": many}


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def golden_status(name: str) -> str:
    """At one width, where most gives way; the others have their tests below."""
    status = SITUATIONS[name]()
    parts = [f"--- 80 columns ---\n{status_text(status, 80)}\n", f"--- not a terminal ---\n{status_text(status)}\n"]
    if name == "degraded":
        parts.append(f"--- 100 columns, styles ---\n{styled(status_lines(status, 100)).markup}\n")
    return "\n".join(parts)


def golden_live(name: str) -> str:
    shown = Curves() if name == "starting" else curves()
    screens = [(size, live_lines(LIVE[name](), shown, *size)) for size in (SIZES[0], SIZES[-1])]
    parts = [f"--- {width} x {height} ---\n{plain(lines)}\n" for (width, height), lines in screens]
    return "\n".join(parts)


def screens() -> dict[str, str]:
    texts = {f"status-{name}.txt": golden_status(name) for name in SITUATIONS}
    return texts | {f"watch-{name}.txt": golden_live(name) for name in LIVE}


@pytest.mark.parametrize("file", [f"status-{n}.txt" for n in SITUATIONS] + [f"watch-{n}.txt" for n in LIVE])
def test_a_screen_is_as_it_was_looked_at(file: str) -> None:
    kind, name = file.removesuffix(".txt").split("-")
    text = golden_status(name) if kind == "status" else golden_live(name)
    assert text == (GOLDEN / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 60, *WIDTHS])
@pytest.mark.parametrize("name", SITUATIONS)
def test_no_line_is_wider_than_the_screen(name: str, width: int) -> None:
    status = SITUATIONS[name]()
    assert max(map(len, status_text(status, width).splitlines())) <= max(width, 60)
    if width >= 80:
        assert max(map(len, status_text(status, width).splitlines())) <= width


@pytest.mark.parametrize(("width", "height"), [(60, 10), (80, 12), *SIZES, (200, 60)])
@pytest.mark.parametrize("name", LIVE)
def test_a_live_screen_fits_and_tells_the_verdict_first(name: str, width: int, height: int) -> None:
    status = LIVE[name]()
    lines = live_lines(status, curves(), width, height)
    assert len(lines) <= height and max(line.cell_len for line in lines) <= max(width, 66)
    assert lines[0].plain.startswith(f"run nano-1b   {status.state}")


@pytest.mark.parametrize("name", SITUATIONS)
def test_colour_changes_no_character(name: str) -> None:
    status, width = SITUATIONS[name](), 100
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=width, highlight=False)
    console.print(styled(status_lines(status, width)), crop=False, overflow="ignore")
    text = out.getvalue()
    assert "\x1b[" in text, "in colour"
    assert re.sub(r"\x1b\[[\d;]*m", "", text).rstrip("\n") == status_text(status, width)


def test_what_failed_and_what_to_do_stand_above_the_units_without_control_characters() -> None:
    for width in (None, *WIDTHS):
        lines = status_text(degraded(), width).splitlines()
        table = next(n for n, line in enumerate(lines) if line.startswith("LEARNER"))
        above = "\n".join(lines[:table])
        assert "rhine failed at 10:13:20: RuntimeError" in above and "my_data.py" in above
        assert "hint: diloco logs rhine --run" in above
        assert all(character.isprintable() for line in lines for character in line)


def test_few_errors_are_shown_of_many() -> None:
    errors = [UnitError(f"node-{n}", "", "no space left") for n in range(64)]
    assert status_text(replace(HEALTHY, errors=errors)).count("no space left") == 5


def test_of_many_learners_those_that_are_not_well_come_first_on_a_live_screen() -> None:
    text = plain(live_lines(many(), curves(), 80, 24))
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("node-")]
    assert rows[:3] == ["node-07", "node-60", "node-21"]
    assert f"and {64 - len(rows)} more learners: {64 - len(rows)} TRAINING" in text
    whole = status_text(many(), 80)
    assert all(f"node-{n:02}" in whole for n in range(64)), "`status` shows all"


def test_every_state_has_a_colour() -> None:
    assert {*map(str, State), *map(str, UNIT_STATES)} <= set(STYLE_OF)


def test_columns_go_by_priority_and_names_last() -> None:
    long = replace(HEALTHY, learners=[replace(IOWA, name="n" * 63)])
    headers = {width: status_text(long, width) for width in (50, 80, 140)}
    assert "UP/DOWN" in headers[140] and "UP/DOWN" not in headers[80]
    assert "IN LAST 10" in headers[80] and "HEARD" in headers[50]
    assert "n" * 23 + "…" in headers[80]
    assert "n" * 63 in status_text(long)


def test_a_chart_has_its_ends_and_extremes() -> None:
    lines = line_chart([(0, 5.0), (50, 1.0), (100, 3.0)], 30, 5, "{:.0f}k".format, "{:.1f}".format)
    assert len(lines) == 5 and all(len(line) <= 30 for line in lines)
    assert lines[0].startswith("5.0┤⠑") and lines[3].startswith("1.0┤") and lines[4].split() == ["0k", "100k"]
    assert line_chart([(0, 1.0), (1, 1.0)], 30, 5, str, str)[0].endswith("⠉"), "a constant is a line"


def test_a_chart_waits_for_its_second_point() -> None:
    text = plain(live_lines(HEALTHY, curves(1), 100, 30))
    assert "held-out loss" not in text, "no chart at all"
    once = curves()
    once.losses = once.losses[:1]
    assert "held-out loss: 5.600 (one so far)" in plain(live_lines(HEALTHY, once, 80, 24))
    unevaluated = curves()
    unevaluated.losses = []
    assert "held-out loss: not evaluated yet" in plain(live_lines(HEALTHY, unevaluated, 80, 24))


def test_the_history_is_bounded_and_forgets_what_a_rollback_undid() -> None:
    def metrics(n: int, tokens: int) -> Metrics:
        merges = [MergeNote(n + i, n, f"2026-01-01T00:00:{i:02}Z", ("iowa",), 1, 1, 0, 0, tokens + i) for i in (0, 1)]
        return Metrics(losses=((0, 5.0), (tokens, 3.0)), recent_merges=tuple(merges))

    found = Curves()
    for n in range(2 * MAX_POINTS):
        found.add(metrics(10 * n, 100 * n))
    assert len(found.rates) <= MAX_POINTS and found.rates[-1] == (100 * n + 1.0, 1.0)
    found.add(metrics(10 * n + 5, 200))
    assert [tokens for tokens, _ in found.rates if tokens > 201] == [] and len(found.losses) == 2
    before = list(found.rates)
    found.add(metrics(10 * n + 5, 200))
    assert found.rates == before, "nothing new, no point"


def test_a_live_screen_says_why_its_status_is_old() -> None:
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, record=True)
    console.print(LiveScreen(HEALTHY, curves(), "status: no answer within 9 s"))
    assert console.export_text().startswith("status: no answer within 9 s")


DOUBTS = "iowa merged the work of 12% of the time: it came late or stood still; rhine has merged nothing; ohio too"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_summary_of_a_run_fits_the_terminal(width: int) -> None:
    learner = LearnerSummary("home-office-workstation", "europe-west4", 9_640_000_000, 0.45, 400, 12)
    made = Summary(
        "nano-1b", "file:///a/long/path/to/the/bucket/of/a/run/nano-1b", "FINISHED", 1915, 1900, 41_200, 10**11, 2.44,
        86_400.0, 0.961, 0.93, 2.8, 10**11, 10**11, 10**9, 10**9, 10**15, [learner], SyncerSummary(3), [EU], "",
        DOUBTS, "",
    )  # fmt: skip
    lines = summary_text(made, width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[-3:] == [
        "  next           diloco export nano-1b",
        "                 diloco report nano-1b",
        "                 diloco verify nano-1b",
    ]
    assert len(summary_text(made).splitlines()) < len(lines) or width == 140, "piped, nothing is wrapped"


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for file, text in screens().items():
        (GOLDEN / file).write_text(text, encoding="utf-8")
