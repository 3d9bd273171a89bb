"""A sample of the newcomer benchmark: round trips are counted, not timed."""

from __future__ import annotations

from tests.benchmarks.newcomer import MOST, OFFERS, measured


def test_a_new_process_starts_within_so_many_round_trips() -> None:
    """21 where no process was there before; then one for each of its offers, as each may be the last."""
    found = measured(commits=700, learners=40)
    assert found["a first process"] <= 24 < found["a second process"] <= 24 + OFFERS + 1 <= MOST
