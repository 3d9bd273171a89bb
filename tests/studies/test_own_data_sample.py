"""The study of own data: its books find what they are for, and a small run passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.studies.own_data import FRAGMENTS, HEADER, read_books, study


def offered(learner: str, start: int, stop: int, seq: int) -> dict[str, Any]:
    """An offer, and as an input of a merge."""
    return {
        "learner": learner, "incarnation": 1, "seq": seq, "fragment": 0, "data_start": start, "data_end": stop,
    }  # fmt: skip


class GivenLog:
    """A run whose log is given: the first offer is merged, and again if `twice`; the others are refused or not."""

    def __init__(self, *offers: dict[str, Any], twice: bool = False) -> None:
        merge = {"inputs": [offers[0]] * (1 + twice), "outputs": [{"fragment": 0}], "outcomes": list(offers[1:])}
        self.kept = {"offer": list(offers), "commit": [merge]}

    def objects(self, kind: str) -> list[dict[str, Any]]:
        return self.kept[kind]

    def is_over(self) -> bool:
        return False


def test_the_books_tell_what_counted_was_discarded_or_lost() -> None:
    run = GivenLog(offered("l0", 0, 100, 1), offered("l0", 130, 150, 2))
    books = read_books(run)  # type: ignore[arg-type]
    assert (books.applied, books.twice, books.discarded, books.lost, books.longest_lost) == (100, 0, 20, 30, 30)
    assert books.ranges == {0: [(0, 100)]} and not books.violations


def test_the_books_find_what_counted_twice_and_what_nobody_answered() -> None:
    twice = read_books(GivenLog(offered("l1", 0, 100, 1), twice=True))  # type: ignore[arg-type]
    assert twice.twice == 100
    unanswered = GivenLog(offered("l1", 0, 100, 1), offered("l1", 100, 110, 2))
    unanswered.kept["commit"][0]["outcomes"] = []
    assert "has no outcome" in read_books(unanswered).violations[0]  # type: ignore[arg-type]


@pytest.mark.long
def test_a_small_run_with_kills_a_joiner_and_a_leaver_has_no_violation(tmp_path: Path) -> None:
    books, row = study(tmp_path, 8 << 20, 1.0, 600)
    assert books.violations == [] and books.twice == 0
    assert books.applied >= FRAGMENTS * (4 << 20) * 0.9
    assert row.count("|") == HEADER.partition("\n")[0].count("|")
