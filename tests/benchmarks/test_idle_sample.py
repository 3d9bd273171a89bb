"""A sample of the idle benchmark: requests are counted, not timed."""

from __future__ import annotations

from tests.benchmarks import idle


def test_an_idle_syncer_turns_four_times_a_second_and_asks_less_often() -> None:
    """Four silent learners for 40 s at slots of 5 s: eight looks a slot into each mailbox of one that was never heard;
    once a slot each incarnation, the log and the requests; a heartbeat each 3 s."""
    clock = idle.idle(learners=4, seconds=40.0)
    assert clock.requests is not None
    assert 150 <= clock.turns <= 162
    assert clock.requests["get"] <= 4 * 8 * (8 + 1) + 9 * (4 + 2)
    assert clock.requests["put"] <= 14 and clock.requests["list"] == clock.requests["create"] == 0
