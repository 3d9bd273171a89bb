"""The words for refused offers, and the count of bad ones."""

from __future__ import annotations

from diloco_cli.protocol.log.records import Outcome
from diloco_cli.protocol.log.refusals import REASONS, bad_in_a_row, is_bad
from diloco_cli.protocol.log.state import RunState
from tests.unit.protocol.records import applied, follow, genesis, merge


def test_each_reason_has_its_words() -> None:
    assert all(one.text and one.text == one.text.strip() for one in REASONS.values())


def test_what_happens_to_honest_learners_is_not_bad() -> None:
    innocent = {"late", "superseded", "unknown_base", "data_overlap", "bad_signature", "run_over", "quarantined"}
    assert not any(map(is_bad, innocent)) and is_bad("non_finite") and not is_bad("no such word")


def test_bad_offers_count_in_a_row() -> None:
    assert bad_in_a_row(3, num_applied=0, num_bad=1) == 4
    assert bad_in_a_row(3, num_applied=1, num_bad=0) == 0
    assert bad_in_a_row(3, num_applied=1, num_bad=2) == 2


def bad(state: RunState, seq: int, reason: str = "non_finite") -> RunState:
    return follow(state, "refuse", outcomes=(Outcome("l0", 1, seq, 0, reason),))


def test_the_log_counts_them_until_one_is_merged() -> None:
    state = bad(bad(bad(genesis(), 0), 1), 2, "late")
    assert state.learner("l0").bad_in_a_row == 2 and state.learner("l1").bad_in_a_row == 0
    assert merge(state, applied("l0", 3)).learner("l0").bad_in_a_row == 0


def test_a_quarantine_and_a_readmission_begin_anew() -> None:
    state = follow(bad(genesis(), 0), "quarantine", learner="l0")
    assert state.learner("l0").bad_in_a_row == 0
    assert follow(bad(state, 1), "readmit", learner="l0").learner("l0").bad_in_a_row == 0
