"""Logs are shown from their end, and cannot steer a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.errors import NotFoundError
from diloco_cli.runtime.logs import Line, StoreWords, by_time, follow, log_files, note_line, printable, tail
from diloco_cli.runtime.registry import log_path


@pytest.fixture
def log(home):
    path = log_path("nano", "iowa")
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain \xc3\xa9\ttab", "plain é\ttab"),
        (b"\x1b[2Jcleared", "\\x1b[2Jcleared"),
        (b"carriage\r", "carriage"),
        (b"a\rb", "a\\rb"),
        (b"\xff", "\\xff"),
        ("turned\u202e".encode(), "turned\\u202e"),
    ],
)
def test_control_characters_are_escaped(line, shown):
    assert printable(line) == shown


def test_the_last_lines_come_also_without_a_last_newline(log):
    log.write_text("one\ntwo\nthree")
    assert tail(log, 2) == ["two", "three"]
    assert tail(log, 0) == []
    log.write_text("one\n")
    assert tail(log, 5) == ["one"]


def test_what_is_added_is_followed_across_a_rotation(log):
    log.write_text("old\n")
    steps = iter([("a", "half"), ("a", " and half\nnext\n"), ("w", "rotated\n")])

    def step() -> bool:
        mode, text = next(steps, ("", ""))
        if mode == "w":
            log.rename(log.with_name("iowa.log.1"))
        if mode:
            with log.open(mode) as file:
                file.write(text)
        return not mode

    assert [line.text for line in follow({"iowa": log}, step)] == ["half and half", "next", "rotated"]


def test_a_missing_log_names_those_there_are(log):
    log.write_text("")
    assert list(log_files("nano")) == ["iowa"]
    with pytest.raises(NotFoundError, match=r"no log of syncer.*logs here: iowa"):
        log_files("nano", "syncer")


def add(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"{line}\n")


def test_each_new_word_about_the_store_is_told_once(log):
    ohio = log_path("nano", "ohio")
    ohio.write_text("12:00 ohio: store: create fails for 3 s: of an earlier supervision\n12:01 commit 7\n")
    words = StoreWords("nano")
    assert words.news() == []
    add(ohio, "12:02 ohio: store: create fails for 3 s: 403")
    add(ohio, "12:02 something else")
    assert words.news() == [Line("ohio", "create fails for 3 s: 403")]
    assert words.news() == []
    add(ohio, "12:03 ohio: store: answers again, after 60 s")
    assert words.news() == [Line("ohio", "answers again, after 60 s")]


def test_a_run_without_logs_has_no_words(log):
    assert StoreWords("other").news() == []


def test_lines_of_several_logs_come_in_the_order_of_their_times_and_a_traceback_stays_with_its_line():
    iowa = ["2026-01-01T00:00:01Z a", "Traceback", "  in f", "2026-01-01T00:00:03.5Z d"]
    syncer = ["2026-01-01T00:00:02Z b", "2026-01-01T00:00:03.2Z c"]
    last: dict[str, str] = {}
    lines = by_time([*(Line("iowa", text) for text in iowa), *(Line("syncer", text) for text in syncer)], last)
    assert [line.text[-1] for line in lines] == ["a", "k", "f", "b", "c", "d"]
    assert by_time([Line("syncer", "2026-01-01T00:00:04Z f"), Line("iowa", "more")], last)[0].text == "more"


def test_a_line_of_the_supervisor_has_its_time(home):
    path = log_path("nano", "supervisor")
    note_line(path, "iowa: started: process 7 \ud800")
    (line,) = tail(path, 5)
    assert line[:2] == "20" and line.endswith("Z iowa: started: process 7 \\ud800")
    assert path.stat().st_mode & 0o777 == 0o600
