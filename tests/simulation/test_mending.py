"""A run that loses single objects, or has them damaged, while it goes on or while its syncer is away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.protocol.log.keys import SYNCER, commit_key, heartbeat_key
from diloco_cli.protocol.log.mending import GapError
from diloco_cli.signing import Checksummed
from tests.histories.replayer import in_one
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


def harm(fleet: ToyFleet, key: str, harms: Harms) -> bytes:
    """What had been there."""
    store = fleet.world.store
    before = store.get(key) or b""
    data = harms(before)
    store.delete(key) if data is None else store.put(key, data)
    return before


def newest(fleet: ToyFleet, kind: str) -> str | None:
    return max(fleet.world.store.list(kind, limit=100_000), default=None)


def of_everybody(fleet: ToyFleet) -> int:
    """Merges of all learners; what is damaged does not count."""
    found = 0
    for key in fleet.world.store.list("commit/", limit=100_000):
        with suppress(ValueError):
            found += len(in_one(fleet.world.store.get(key) or b"").get("inputs", ())) == len(fleet.run.islands)
    return found


def all_go_on(fleet: ToyFleet) -> bool:
    goal = of_everybody(fleet) + 8
    return fleet.world.run(lambda: fleet.num_commits() >= goal and of_everybody(fleet) >= goal, WITHIN_S)


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_object_less_and_merges_go_on(kind: str, how: str) -> None:
    """The newest object of every kind, while everybody lives."""
    fleet = ToyFleet(RUN).start().until_commits(80 if kind == "snapshot" else 20)
    store, before = fleet.world.store, dict[str, bytes]()
    for _ in range(3):
        if (key := newest(fleet, kind)) is not None:
            before = {key: harm(fleet, key, HARMS[how])} | before
        assert all_go_on(fleet)
    assert fleet.errors() == []
    if kind in ("FORMAT", "commit"):
        assert fleet.world.run(lambda: all(store.get(key) == data for key, data in before.items()), WITHIN_S)
        assert check(fleet).kinds
    if kind in ("FORMAT", "commit", "heartbeat", "incarnation", "epoch"):
        assert verified_integers(store, fleet.run).ok


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize(("fragments", "quorum"), [(1, 2), (4, 2), (4, 1)])
def test_an_offer_that_is_harmed_before_anybody_has_read_it_silences_no_learner(
    fragments: int, quorum: int, how: str
) -> None:
    """Where the next merge needs it, and its learner no other offers to make before, only this one can put it back."""
    fleet = ToyFleet(replace(make_run(2, fragments, 400, quorum=quorum), checksums=True, keyring=Checksummed("id")))
    fleet.start().until_commits(20)
    before = set(fleet.world.store.list("offer/", limit=100_000))
    new = list[str]()

    def is_offered() -> bool:
        new[:] = set(fleet.world.store.list("offer/", limit=100_000)) - before
        return bool(new)

    assert fleet.world.run(is_offered, WITHIN_S)
    harm(fleet, new[0], HARMS[how])
    assert all_go_on(fleet)
    assert fleet.errors() == []


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


@pytest.mark.parametrize("how", HARMS)
def test_a_syncer_leaves_a_whole_log_behind(how: str) -> None:
    """What is lost shortly before the run ends would be looked at some seconds later, when nobody holds it any more."""
    fleet = ToyFleet(replace(make_run(merges=20), checksums=True, keyring=Checksummed("id"))).start().until_commits(19)
    keys = [commit_key(n) for n in (0, 7, 18)]
    before = {key: fleet.world.store.get(key) for key in keys}
    for key in keys:
        harm(fleet, key, HARMS[how])
    fleet.finish()
    assert {key: fleet.world.store.get(key) for key in keys} == before and fleet.errors() == []


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
