"""Why a learner is never merged, in one line."""

from __future__ import annotations

from diloco_cli.observe.situation import refusals_of
from diloco_cli.protocol.log.metrics import Note


def test_refusals_of_one_learner_are_summed_up_by_reason_the_most_frequent_first() -> None:
    notes = [
        Note("then", "refused", "l0", "bad_payload", 3),
        Note("then", "refused", "l0", "late", 2),
        Note("then", "refused", "l0", "bad_payload", 4),
        Note("then", "refused", "l0", "wrong_base"),
        Note("then", "refused", "l1", "bad_norms", 90),
        Note("then", "rollback", "l0", "late", 90),
    ]
    told = refusals_of(notes, "l0")
    first, second = told.split("; ")
    assert first.startswith("7 refused: bad_payload (its payload's header is not the one that the layout gives")
    assert second.startswith("2 refused: late (it came when its slot had been merged")
    assert refusals_of(notes, "l2") == ""
