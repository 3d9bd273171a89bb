"""A sample of the pace benchmark, and of the offers that it generates in the learners' place."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.log.commits import Commit, Merge
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import decode
from tests.benchmarks import pace

LEARNERS, MERGES = 6, 40


def merged_of(told: bool) -> tuple[RunState, dict[tuple[int, str], tuple[int, int, int]]]:
    """The last state; of each merged slot and learner the offer's number, how old its base was, and its tokens."""
    fleet, found = pace.fleet_of(LEARNERS, 1.0, told), dict[tuple[int, str], tuple[int, int, int]]()
    fleet.start()
    assert fleet.world.run(lambda: fleet.state.merges >= MERGES, 10 * MERGES)
    for n in range(fleet.state.n + 1):
        commit = decode(Commit, fleet.world.store.get(commit_key(n)) or b"", "log")
        assert not commit.outcomes
        for one in commit.inputs if isinstance(commit, Merge) else ():
            found[commit.slot, one.learner] = (one.seq, n - one.base, one.tokens)
    return fleet.state, found


def test_told_learners_offer_what_the_products_do() -> None:
    """In each slot, from the same bases; a learner that hears a little earlier or later sends a step apart."""
    (_, theirs), (_, ours) = merged_of(told=False), merged_of(told=True)
    assert len(ours) == LEARNERS * MERGES and ours.keys() == theirs.keys()
    steady = sorted(ours)[pace.FRAGMENTS * LEARNERS :]
    assert [ours[key][:2] for key in steady] == [theirs[key][:2] for key in steady]
    assert all(abs(ours[key][2] - theirs[key][2]) <= pace.BATCH_TOKENS for key in steady)


@pytest.mark.parametrize("told", [False, True])
def test_too_short_a_slot_misses_the_pace(told: bool) -> None:
    """Each slot takes several calls of the syncer in turn."""
    assert pace.play(4, 0.1, 150, told).slots > pace.MAX_SLOTS


def test_told_learners_keep_pace() -> None:
    found = pace.play(8, 1.0, 200, told=True)
    assert found.slots <= pace.MAX_SLOTS and found.inputs == 1.0
    assert found.holds, found.kept
