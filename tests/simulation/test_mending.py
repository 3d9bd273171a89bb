"""A run that loses single objects, or has them damaged, while it goes on or while its syncer is away."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.protocol.log.keys import FORMAT_KEY, SYNCER, commit_key, heartbeat_key
from diloco_cli.protocol.log.mending import GapError
from diloco_cli.signing import Checksummed
from tests.simulation.sweeps import check
from tests.simulation.toy import ToyFleet, make_run
from tests.studies.verifying import verified_integers

Harms = Callable[[bytes], bytes | None]
RUN = replace(make_run(merges=400, skip_after_s=0.5), checksums=True, keyring=Checksummed("id"))
HARMS: dict[str, Harms] = {
    "deleted": lambda data: None,
    "flipped": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "truncated": lambda data: data[: len(data) // 2],
}
KINDS = ("FORMAT", "commit", "weights", "state", "offer", "incarnation", "heartbeat", "snapshot", "epoch", "delta")
WITHIN_S = 60.0


def harm(fleet: ToyFleet, key: str, harms: Harms) -> None:
    store = fleet.world.store
    data = harms(store.get(key) or b"")
    store.delete(key) if data is None else store.put(key, data)


def newest(fleet: ToyFleet, kind: str) -> str | None:
    return max(fleet.world.store.list(kind, limit=100_000), default=None)


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_object_less_and_merges_go_on(kind: str, how: str) -> None:
    """The newest object of every kind, while everybody lives."""
    fleet = ToyFleet(RUN).start().until_commits(80)
    for _ in range(3):
        if (key := newest(fleet, kind)) is not None:
            harm(fleet, key, HARMS[how])
        n = fleet.num_commits()
        fleet.until_commits(n + 8, WITHIN_S)
    assert fleet.errors() == []
    if kind in ("FORMAT", "commit"):
        fleet.world.run_for(WITHIN_S)
        assert fleet.world.store.get(FORMAT_KEY) == fleet.format
        assert check(fleet).kinds
    if kind in ("FORMAT", "commit", "heartbeat", "incarnation", "epoch"):
        assert verified_integers(fleet.world.store, fleet.run).ok


@pytest.mark.parametrize(
    ("back", "how"), [(0, "flipped"), (0, "truncated"), (1, "deleted"), (12, "flipped"), (31, "deleted")]
)
def test_a_commit_that_the_next_syncer_cannot_read_comes_from_a_learner(back: int, how: str) -> None:
    """Every commit of this run that the learners hold; there are no snapshots yet that lead past it."""
    fleet = ToyFleet(RUN).start().until_commits(40)
    fleet.restart = False
    fleet.world.run_for(1.0)
    fleet.kill("syncer")
    fleet.world.run_for(1.0)
    n = fleet.num_commits() - 1
    key = commit_key(n - back)
    before = fleet.world.store.get(key)
    harm(fleet, key, HARMS[how])
    fleet.syncer()
    fleet.until_commits(n + 10, WITHIN_S)
    assert fleet.world.store.get(key) == before and fleet.errors() == []
    assert verified_integers(fleet.world.store, fleet.run).ok


def test_a_gap_that_nobody_can_fill_ends_the_syncer_and_nothing_is_written() -> None:
    fleet = ToyFleet(RUN).start().until_commits(31)
    fleet.restart = False
    fleet.kill_all()
    there = set(fleet.world.store.list("commit/"))
    harm(fleet, commit_key(19), HARMS["deleted"])
    syncer = fleet.syncer()
    assert fleet.ended_within(syncer, 2 * WITHIN_S)
    error = syncer.error
    assert isinstance(error, GapError) and error.where == commit_key(19)
    assert "commit 20 was written after it: 19 must" in str(error)
    assert set(fleet.world.store.list("commit/")) == there - {commit_key(19)}


def test_a_head_that_was_deleted_is_known_from_the_heartbeat_of_the_syncer_before() -> None:
    fleet = ToyFleet(RUN).start().until_commits(31)
    fleet.world.run_for(4.0)
    fleet.restart = False
    fleet.kill_all()
    last = fleet.num_commits() - 1
    for n in range(last - 20, last + 1):
        harm(fleet, commit_key(n), HARMS["deleted"])
    syncer = fleet.syncer()
    assert fleet.ended_within(syncer, 2 * WITHIN_S)
    assert isinstance(syncer.error, GapError) and syncer.error.where == commit_key(last - 20)
    again = fleet.syncer()
    assert fleet.ended_within(again, 2 * WITHIN_S) and isinstance(again.error, GapError), "it forgets nothing"
    fleet.world.store.delete(heartbeat_key(SYNCER))
    fleet.syncer()
    fleet.until_commits(last - 18)
