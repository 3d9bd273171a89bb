"""A small form of what the exchange costs an island of ranks: two of them, and a device whose copies end late."""

from __future__ import annotations

from tests.benchmarks.rank_blocking import measured, percent
from tests.benchmarks.rank_memory import MemoryCase

MOST_PERCENT = 10.0  # of a model so small that each fragment's message weighs more than its bytes


def test_ranks_send_and_adopt_in_little_time_and_wait_for_no_copy() -> None:
    found = measured(MemoryCase("small", 2, 2, fragments=4))
    assert found["waits"] == [0.0]
    for name in ("exchange", "slow exchange"):
        assert max(percent(found, name)) < MOST_PERCENT
