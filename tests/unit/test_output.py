"""Progress of what takes its time: on a terminal alone, and not with -q."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from diloco_cli.cli import supervision
from diloco_cli.cli.arguments import open_run
from diloco_cli.cli.hooks import HookCaller, Hooks
from diloco_cli.cli.output import progress
from diloco_cli.cli.supervision import ProgressDisplay
from diloco_cli.clock import sleep_s
from tests.cli.bucket import make_bucket


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    """As stderr of a command with these arguments. (pytest sets its own before each test.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", found := Terminal())
        patch.setattr(sys, "argv", ["diloco", *words])
        patch.setenv("TERM", "xterm")
        yield found


def test_progress_shows_what_is_done_and_how_much_of_it_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal("verify") as seen, progress("replaying the log") as shown:
        shown.share = lambda: 0.43
        print("data")
    assert "replaying the log" in seen.getvalue() and "43%" in seen.getvalue()
    assert capsys.readouterr().out == "data\n", "stdout is for data"


@pytest.mark.parametrize("words", [("--debug", "-q", "verify"), ("verify", "toy", "--quiet")])
def test_nothing_is_shown_where_no_terminal_is_or_with_q(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal(*words) as seen, progress("replaying the log"):
        pass
    assert seen.getvalue() == ""
    with progress("replaying the log"):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_error_passes_and_leaves_the_cursor_as_it_was() -> None:
    with terminal("verify") as seen, pytest.raises(ZeroDivisionError), progress("replaying the log"):
        raise ZeroDivisionError
    assert seen.getvalue().rindex("\x1b[?25h") > seen.getvalue().rindex("\x1b[?25l")


def test_a_supervisor_that_is_killed_leaves_the_cursor_as_it_was(tmp_path: Path) -> None:
    opened = open_run(make_bucket(tmp_path / "nano"))
    with terminal("launch") as seen, ProgressDisplay(opened, HookCaller(Hooks(), "nano", opened.url, print), []):
        shown = seen.getvalue()
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "nothing may come after this"


def test_a_bucket_that_goes_is_told_in_one_line_above_a_screen_that_says_how_old_it_is(tmp_path: Path) -> None:
    opened = open_run(make_bucket(folder := tmp_path / "nano"))
    with terminal("launch") as seen:
        display = ProgressDisplay(opened, HookCaller(Hooks(), "nano", opened.url, print), [])
        with patch.object(supervision, "SCREEN_EVERY_S", 0.05), display:
            while "STARTING" not in seen.getvalue():
                sleep_s(0.02)
            folder.rename(tmp_path / "gone")
            while seen.getvalue().count(" old: ") < 3:
                sleep_s(0.02)
    assert "status: " not in seen.getvalue()
