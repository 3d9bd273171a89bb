"""Foreign commands: their words, their time, their absence."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.engines.tool import run_tool
from diloco_cli.errors import TryAgainError, UsageError


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tool"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return path


def test_it_reads_what_it_is_given_and_says_it_in_its_own_words(tool: Path) -> None:
    tool.write_text('#!/bin/sh\ncat; echo "$1 $LC_ALL"\n')
    assert run_tool(("tool", "a b"), "given\n", within_s=20.0, refusal=UsageError) == "given\na b C\n"


def test_a_refusal_has_its_words(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nprintf 'tool: no\\n\\033[1msuch thing\\n' >&2; exit 3\n")
    with pytest.raises(UsageError, match=r"^tool: tool: no; \\x1b\[1msuch thing$"):
        run_tool(("tool",), within_s=20.0, refusal=UsageError)
    tool.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(TryAgainError, match=r"^tool: ended with status 3$"):
        run_tool(("tool",), within_s=20.0, refusal=TryAgainError)


def test_one_that_does_not_answer_is_not_waited_for(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(TryAgainError, match=r"tool did not answer within 0\.2 s"):
        run_tool(("tool",), within_s=0.2, refusal=UsageError)


def test_one_that_is_not_there_is_told(tool: Path) -> None:
    tool.unlink()
    with pytest.raises(UsageError, match="no command tool"):
        run_tool(("tool",), within_s=20.0, refusal=TryAgainError)
