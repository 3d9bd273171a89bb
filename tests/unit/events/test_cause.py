"""What ended a process, as people are told: the user's own file and line, and no secret."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_cli.errors import UsageError
from diloco_cli.events.cause import MAX_CAUSE_BYTES, Cause, cause_of, note_position, safe

USERS = """
import json


def batch(position):
    return [][position]


def parse():
    return json.loads("{")


def fetch():
    raise ConnectionError("reset by peer")


def load():
    open("/nowhere/at/all")
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A module of the user's, beside the run file."""
    path = tmp_path / "my_model.py"
    path.write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location("my_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raised(work: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        work()
    return caught.value


def test_an_error_of_the_users_code_names_its_file_and_line(users) -> None:
    cause = cause_of(raised(lambda: users.batch(41)))
    assert cause.text == "your code: my_model.py:6 in batch: IndexError: list index out of range"
    assert (cause.place, cause.lasting) == ("my_model.py:6", True)


def test_a_library_that_the_users_code_calls_is_not_its_place(users) -> None:
    assert cause_of(raised(users.parse)).place == "my_model.py:10"


def test_a_declared_error_is_told_by_what_caused_it(users) -> None:
    def wrapped() -> None:
        try:
            users.batch(41)
        except IndexError as error:
            raise UsageError("the data's batch raised an error") from error

    assert cause_of(raised(wrapped)).text.startswith("your code: my_model.py:6 in batch: IndexError")


def test_the_world_outside_may_heal_and_a_missing_file_does_not(users) -> None:
    assert not cause_of(raised(users.fetch)).lasting
    assert cause_of(raised(users.load)).lasting


def test_an_error_of_diloco_has_no_place() -> None:
    def own() -> None:
        json.loads("{")

    error = raised(lambda: UsageError(1, 2, 3))  # type: ignore[call-arg, arg-type]
    assert "your code" in cause_of(error).text  # this test is a user's code too
    assert cause_of(UsageError("no such run")) == Cause("no such run")
    assert cause_of(ValueError("x")) == Cause("ValueError: x")


def test_a_learners_position_comes_along(users) -> None:
    error = raised(lambda: users.batch(41))
    note_position(error, 12_800)
    assert cause_of(error).position == 12_800


def test_no_secret_and_no_control_character_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DATA_TOKEN", "canary-token-4711")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-aws-4712")
    told = safe(
        "401 for https://me:canary-password-4713@host/x?X-Amz-Signature=canary4714&part=1 canary-token-4711 "
        "canary-aws-4712 \x1b]0;title\x07 \u202e\nnext"
    )
    assert "canary" not in told and "part=1" in told
    assert told.isprintable() and "\\x1b" in told and "\\u202e" in told


def test_a_cause_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(safe("€" * 5000).encode()) <= MAX_CAUSE_BYTES
    assert safe("\ud800") == "\\ud800"
