"""The one place where errors become an exit status and a line of text."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from diloco_cli.cli import main as boundary
from diloco_cli.cli.main import COMMANDS

Ending = tuple[int, str]


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[BaseException], Ending]:
    """What `diloco` ends with if a command raises this: (exit status, stderr)."""

    def end(error: BaseException) -> Ending:
        monkeypatch.setattr(sys, "argv", ["diloco", "runs"])
        monkeypatch.setattr(boundary, "app", Mock(side_effect=error))
        with pytest.raises(SystemExit) as ended:
            boundary.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    return end


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EDQUOT, "quota")])
def test_a_full_disk_is_said_to_be_one(ending: Callable[[BaseException], Ending], number: int, words: str) -> None:
    status, text = ending(OSError(number, "whatever the system says", "/somewhere/file"))
    assert status == 13
    assert words in text and "/somewhere/file" in text and "hint: " in text and "bug" not in text


def test_a_reader_that_has_gone_is_no_error(ending: Callable[[BaseException], Ending]) -> None:
    assert ending(BrokenPipeError()) == (0, "")


def test_any_other_error_of_the_system_is_a_bug(ending: Callable[[BaseException], Ending]) -> None:
    status, text = ending(OSError(errno.EIO, "input/output error"))
    assert status == 1 and "a bug in diloco" in text


def test_an_error_of_the_users_own_code_is_no_bug_in_diloco(ending: Callable[[BaseException], Ending]) -> None:
    def batch() -> None:
        raise IndexError("past the end")

    with pytest.raises(IndexError) as caught:
        batch()
    status, text = ending(caught.value)
    assert status == 1 and "bug in diloco" not in text
    assert text.startswith("error: your code: tests/unit/test_main.py:") and "in batch: IndexError: past the" in text


def test_output_that_nobody_reads_ends_quietly() -> None:
    command = [sys.executable, "-m", "diloco_cli", "--help"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == "" and child.wait(30) in (0, 1)


def test_the_list_of_commands_loads_no_command() -> None:
    """Each starts fast, and so does the list."""
    code = (
        "import sys; sys.argv = ['diloco', '--help']\n"
        "from diloco_cli.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded', *(name for name in sys.modules if name.startswith('diloco_cli.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.partition("loaded ")[2].split())
    assert "diloco_cli.cli.main" in loaded and not loaded & {f"diloco_cli.cli.{name}" for name in COMMANDS}
    assert {name.split(".")[1] for name in loaded} <= {"cli", "clock", "environment", "errors"}


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("status toy -q --json", "-q status toy --json"),
        ("--debug launch run.yaml --quiet", "--debug --quiet launch run.yaml"),
        ("status -- -q", "status -- -q"),
    ],
)
def test_options_of_diloco_itself_may_stand_after_the_command(typed: str, read: str) -> None:
    assert boundary.everywhere_first(typed.split()) == read.split()
