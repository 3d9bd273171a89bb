"""What a process tells of its own end: to its supervisor, or to the bucket where none started it."""

from __future__ import annotations

import os

import pytest

from diloco_cli.errors import DataCheckError, FencedError, StoreError, TerminatedError
from diloco_cli.events.bucket import EventReader
from diloco_cli.runtime.causes import CAUSE_VARIABLE, cause_path, hint_of, read_cause, telling_why
from diloco_cli.store.open import open_store

pytestmark = pytest.mark.usefixtures("home")
URL = "memory://causes"


def end(error: BaseException, unit: str = "iowa", url: str = URL) -> None:
    with pytest.raises(type(error)), telling_why(url, unit):
        raise error


def told(url: str = URL) -> list[tuple[str, str]]:
    return [(event.unit, event.kind) for event in EventReader().read(open_store(url))]


def test_without_a_supervisor_the_bucket_is_told_once_in_a_while() -> None:
    url = f"{URL}/alone"
    for _ in range(3):
        end(ValueError("x"), url=url)
    end(ValueError("y"), "rhine", url)
    assert sorted(told(url)) == [("iowa", "error"), ("rhine", "error")]


def test_a_supervisor_reads_it_from_a_file_and_tells_the_bucket_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAUSE_VARIABLE, f"{os.getppid()}:{cause_path('nano', 'iowa')}")
    url = f"{URL}/supervised"
    end(StoreError("not found"), url=url)
    cause = read_cause("nano", "iowa", os.getpid())
    assert cause is not None and cause.text.endswith("StoreError: not found") and told(url) == []
    assert read_cause("nano", "iowa", os.getpid() + 1) is None, "that of an earlier process"
    end(ValueError("of a child of the unit"), "evaluator", url)
    assert told(url) == [("evaluator", "error")]


def test_a_unit_whose_supervisor_has_died_tells_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAUSE_VARIABLE, f"1234567:{cause_path('nano', 'iowa')}")
    url = f"{URL}/orphaned"
    end(ValueError("x"), url=url)
    assert read_cause("nano", "iowa", os.getpid()) is not None and told(url) == [("iowa", "error")]


def test_a_supervisor_ends_with_the_hint_of_the_error_that_ended_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a lost state that is where to go back to."""
    monkeypatch.setenv(CAUSE_VARIABLE, f"{os.getppid()}:{cause_path('nano', 'syncer')}")
    end(DataCheckError("lost", hint="diloco rollback nano --to 7; then: diloco resume nano"), "syncer", f"{URL}/lost")
    cause = read_cause("nano", "syncer", os.getpid())
    assert cause is not None and cause.hint == "diloco rollback nano --to 7; then: diloco resume nano"
    assert hint_of("nano", "syncer", cause) == cause.hint
    assert "diloco logs syncer" in hint_of("nano", "syncer", None)


@pytest.mark.parametrize("error", [TerminatedError("asked"), FencedError("another"), SystemExit(0)])
def test_a_clean_end_is_no_error(error: BaseException) -> None:
    end(error, url=f"{URL}/clean")
    assert told(f"{URL}/clean") == []


def test_a_bucket_that_cannot_be_told_hides_no_error() -> None:
    end(ValueError("the error itself"), url="nonsense://")
