"""A launch hears from its units' logs what the bucket cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.launch.logs import Line
from diloco_cli.launch.store_words import StoreWords
from diloco_cli.processes.registry import log_path


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    path = log_path("nano", "ohio")
    path.parent.mkdir(parents=True)
    path.write_text("12:00 ohio: store: create fails for 3 s: of an earlier supervision\n12:01 commit 7\n")
    return path


def add(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"{line}\n")


def test_each_new_word_about_the_store_is_told_once(log: Path) -> None:
    words = StoreWords("nano")
    assert words.news() == []
    add(log, "12:02 ohio: store: create fails for 3 s: 403")
    add(log, "12:02 something else")
    assert words.news() == [Line("ohio", "create fails for 3 s: 403")]
    assert words.news() == []
    add(log, "12:03 ohio: store: answers again, after 60 s")
    assert words.news() == [Line("ohio", "answers again, after 60 s")]


def test_a_run_without_logs_has_no_words(log: Path) -> None:
    assert StoreWords("other").news() == []
