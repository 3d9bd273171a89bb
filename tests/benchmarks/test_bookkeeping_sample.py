"""A sample of the bookkeeping benchmark: what it times is done, for few learners."""

from __future__ import annotations

from tests.benchmarks import bookkeeping


def test_every_learner_of_the_log_is_merged_and_its_next_offer_stays_pending() -> None:
    log = bookkeeping.made_log(6, merges=2)
    found = bookkeeping.times(log, 2)  # asserts that the inbox keeps every offer
    assert len(found.decode) == len(found.beyond_decoding) == 2
    assert found.read == found.written, "too short to be compressed"
    assert {name: known.merges for name, known in log.state.learners.items()} == dict.fromkeys(log.names, 4)
    assert len(log.names) == 6 and len(log.state.members) == 3


def test_a_long_commit_is_compressed() -> None:
    found = bookkeeping.times(bookkeeping.made_log(300, merges=1), 1)
    assert found.read[0] < found.written[0] / 2
