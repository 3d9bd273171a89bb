"""What a replay keeps of a bucket that has lost everything; whole replays are in tests/numerics."""

from __future__ import annotations

from dataclasses import asdict

from diloco_cli.cli.run_data import disagreement
from diloco_cli.observe.replay import MOST_LISTED, Replay


def test_complaints_are_listed_up_to_a_bound_and_counted_beyond() -> None:
    found = Replay()
    for number in range(3 * MOST_LISTED):
        found.note(found.missing, f"key {number}")
        found.note(found.mismatches, f"other {number}")
    assert not found.ok and found.missing[-1] == f"key {MOST_LISTED - 1}"
    assert len(found.missing) == len(found.mismatches) == MOST_LISTED
    assert asdict(found)["unlisted"] == 4 * MOST_LISTED
    shown = disagreement(found, "memory://run").message
    assert shown.startswith("the bucket does not agree with its log: missing: key 0;")
    assert f"(and {6 * MOST_LISTED - shown.count('; ') - 1} more)" in shown
