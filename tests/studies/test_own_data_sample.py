"""The study of own data: its books find what they are for, and a small run passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco_cli.store.gcs import GCSStore
from tests.contract.fake_gcs import FakeGCS
from tests.studies.data_books import MOVED, OUTGROWN, REPLACED, DataBooks, read_data_books
from tests.studies.own_data import (
    FRAGMENTS,
    HEADER,
    LEARNERS,
    MOST_WAITING_PERCENT,
    DisturbedRun,
    check_sequences,
    study,
    write_shards,
)


def offered(
    learner: str, start: int, stop: int, seq: int, incarnation: int = 1, began: int | None = None,
    events: tuple[dict[str, Any], ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """An offer, and as an input of a merge."""
    return {
        "learner": learner, "incarnation": incarnation, "seq": seq, "fragment": 0, "data_start": start,
        "data_end": stop, "began": None if began is None else {"position": began}, "events": list(events),
    }  # fmt: skip


def books_of(*offers: dict[str, Any], twice: bool = False, refused: bool = True) -> DataBooks:
    """Of a log in which the first offer is merged, and again if `twice`; the others are refused or not."""
    outcomes = list(offers[1:]) if refused else []
    merge = {"inputs": [offers[0]] * (1 + twice), "outputs": [{"fragment": 0}], "outcomes": outcomes}
    return read_data_books([merge], list(offers), False, 50)


STEPS = {"kind": "steps", "count": 1, "batch_tokens": 10}


def test_the_books_tell_what_counted_was_discarded_or_lost_with_its_process() -> None:
    books = books_of(offered("l0", 0, 100, 0, began=0), offered("l0", 130, 150, 0, 2, began=130))
    assert (books.applied, books.twice, books.discarded, books.lost, books.given_up) == (100, 0, 20, 30, 0)
    assert books.ranges == {"l0": [(0, 100)]} and not books.violations
    far = books_of(offered("l0", 0, 100, 0, began=0), offered("l0", 160, 170, 0, 2, began=160))
    assert "more than one offer may hold was lost" in far.violations[0]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"kind": "adopted", "mixing": "replace"}, REPLACED),
        ({"kind": "dropped"}, OUTGROWN),
        ({"kind": "moved", "position": 30}, MOVED),
    ],
)
def test_what_a_living_learner_gave_up_has_its_reason(event: dict[str, Any], reason: str) -> None:
    first = offered("l0", 0, 10, 0, began=0, events=(STEPS,))
    books = books_of(first, offered("l0", 30, 40, 1, events=(STEPS, STEPS, event, STEPS)))
    assert (books.given_up, books.lost, books.violations) == (20, 0, [])
    assert [stretch.reason for stretch in books.stretches] == [reason]
    unsaid = books_of(first, offered("l0", 30, 40, 1, events=(STEPS, STEPS, STEPS)))
    assert "nobody says why" in unsaid.violations[0], "a position that just vanished"


def test_the_books_find_what_counted_twice_and_what_nobody_answered() -> None:
    assert books_of(offered("l1", 0, 100, 1), twice=True).twice == 100
    unanswered = books_of(offered("l1", 0, 100, 1), offered("l1", 100, 110, 2), refused=False)
    assert "has no outcome" in unanswered.violations[0]


def test_steps_hardly_wait_for_shards_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGCS("runs") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        tokens = write_shards(GCSStore("runs", "tokens"), 4 << 20)
        run = DisturbedRun(tmp_path, server, 130_000, 4096, real=True, names=LEARNERS[:1])
        try:
            assert run.diloco("launch", "run.yaml").wait() == 0, (tmp_path / "said.log").read_text()[-3000:]
            waiting = run.waiting()
            books = read_data_books(run.objects("commit"), run.objects("offer"), run.is_over(), run.most_lost())
            check_sequences(run, books, tokens)
        finally:
            run.end()
    most = 2 * MOST_WAITING_PERCENT  # other tests take the cores too; the study asks for half of it
    assert waiting.keys() == {"l0"} and max(waiting.values()) <= most, waiting
    assert books.applied > 0 and books.twice == 0 and books.violations == []


@pytest.mark.long
@pytest.mark.parametrize("real", [False, True])
def test_a_small_run_with_kills_a_joiner_and_a_leaver_has_no_violation(tmp_path: Path, real: bool) -> None:
    books, row = study(tmp_path, 8 << 20, 0.5 if real else 1.0, 600, real)
    assert books.violations == [] and books.twice == 0
    assert books.applied >= FRAGMENTS * (4 << 20) * (0.4 if real else 0.9)
    assert row.partition("\n")[0].count("|") == HEADER.partition("\n")[0].count("|")
