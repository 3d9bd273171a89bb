"""No record of the log becomes too long for one, and a snapshot that would be is written in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.collection import is_garbage
from diloco_cli.protocol.actors.inbox import MAX_OUTCOMES_A_COMMIT, Inbox
from diloco_cli.protocol.log import commit_log, records
from diloco_cli.protocol.log.commit_log import read_log, snapshot_at, snapshots_between, write_snapshot
from diloco_cli.protocol.log.keys import read_snapshot_key, read_snapshot_piece_key
from diloco_cli.protocol.log.records import Outcome, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from tests.simulation.bucket_check import commits_of
from tests.simulation.operated import request, started
from tests.simulation.toy import make_run
from tests.unit.protocol.records import RUN, commit, genesis

CLOCK = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)


def test_what_is_too_much_for_one_commit_goes_with_the_next_in_the_order_of_arrival() -> None:
    inbox = Inbox(RUN)
    flood = [Outcome("l1", 1, seq, 0, "bad_signature") for seq in range(2 * MAX_OUTCOMES_A_COMMIT)]
    inbox.outcomes = [*flood, Outcome("l0", 1, 0, 0, "bad_norms")]
    taken: list[Any] = [inbox.take_outcomes() for _ in range(4)]
    assert [len(outcomes) for outcomes in taken] == [MAX_OUTCOMES_A_COMMIT, MAX_OUTCOMES_A_COMMIT, 1, 0]
    assert taken[0] == tuple(flood[:MAX_OUTCOMES_A_COMMIT]) and taken[2][0].learner == "l0"
    longest = Outcome("l" * 63, 10**7, 10**9, 10**4, "digest_mismatch")
    record = encode(commit(genesis(), "refuse", outcomes=(longest,) * MAX_OUTCOMES_A_COMMIT))
    assert len(record) < records.MAX_RECORD_BYTES / 4


@pytest.fixture
def long_state(monkeypatch: pytest.MonkeyPatch) -> tuple[MemoryStore, RunState]:
    """A log of one commit whose state is longer than one record may be, and the bucket with its snapshot."""
    monkeypatch.setattr(commit_log, "PIECE_BYTES", 300)
    store = MemoryStore()
    store.create("commit/000000000000.json", encode(commit(RunState(), "epoch_start", outputs=genesis().outputs)))
    state = perform(read_log(RUN), store, CLOCK)
    perform(write_snapshot(RUN, state), store, CLOCK)
    return store, state


def test_a_state_too_long_for_a_record_lies_in_pieces(long_state: tuple[MemoryStore, RunState]) -> None:
    store, state = long_state
    pieces = [key for key in store.list("snapshot/") if read_snapshot_key(key) is None]
    assert len(pieces) >= 3 and {read_snapshot_piece_key(key) for key in pieces} == {0}
    assert all(len(store.get(key, 1000) or b"") <= 300 for key in pieces)
    assert perform(snapshots_between(0, 0), store, CLOCK) == (0,)
    assert perform(snapshot_at(RUN, 0), store, CLOCK) == state == perform(read_log(RUN), store, CLOCK)


@pytest.mark.parametrize("damage", ["missing", "other bytes"])
def test_a_piece_that_is_not_sound_makes_the_snapshot_unsound(
    damage: str, long_state: tuple[MemoryStore, RunState]
) -> None:
    store, state = long_state
    piece = store.list("snapshot/")[1]
    store.delete(piece)
    if damage == "other bytes":
        store.create(piece, b"other bytes")
    assert perform(snapshot_at(RUN, 0), store, CLOCK) is None
    assert perform(read_log(RUN), store, CLOCK) == state, "from commit 0"


@pytest.mark.parametrize("named", ["../../x", "d" * 3000, "no digest"])
def test_a_record_that_names_no_digests_is_no_snapshot(named: str, long_state: tuple[MemoryStore, RunState]) -> None:
    store, state = long_state
    for pieces in ([named], [], [digest(b"")] * (commit_log.MAX_PIECES + 1)):
        store.delete("snapshot/000000000000.json")
        store.create("snapshot/000000000000.json", encode({"pieces": pieces}))
        assert perform(snapshot_at(RUN, 0), store, CLOCK) is None
        assert perform(read_log(RUN), store, CLOCK) == state


def test_pieces_go_with_their_snapshot(long_state: tuple[MemoryStore, RunState]) -> None:
    store, state = long_state
    floor = structs.replace(state, n=200)
    assert all(is_garbage(key, floor, 1, snapshot=64) for key in store.list("snapshot/"))
    assert not any(is_garbage(key, floor, 1, snapshot=0) for key in store.list("snapshot/"))


def test_a_state_too_long_for_all_pieces_is_read_from_the_log(
    monkeypatch: pytest.MonkeyPatch, long_state: tuple[MemoryStore, RunState]
) -> None:
    _, state = long_state
    store = MemoryStore()
    monkeypatch.setattr(commit_log, "MAX_PIECES", 2)
    perform(write_snapshot(RUN, state), store, CLOCK)
    assert store.list("snapshot/") == store.list("hint/") == []


@pytest.mark.parametrize("last", ["stop", "finish"])
def test_the_last_commit_leaves_no_outcome_behind(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = [Outcome("l1", 1, 1000 + seq, 0, "bad_signature") for seq in range(7)]
    refuse_all = Inbox.refuse_all

    def flooded(inbox: Inbox, reason: str) -> None:
        refuse_all(inbox, reason)
        inbox.outcomes += flood

    monkeypatch.setattr(Inbox, "refuse_all", flooded)
    monkeypatch.setattr("diloco_cli.protocol.actors.inbox.MAX_OUTCOMES_A_COMMIT", 3)
    fleet = started(make_run(merges=40 if last == "stop" else 6), 3)
    if last == "stop":
        request(fleet, "stop")
    fleet.finish()
    commits = commits_of(fleet.world.store)
    assert commits[-1]["kind"] == last and all(len(commit["outcomes"]) <= 3 for commit in commits)
    told = [outcome["seq"] for commit in commits for outcome in commit["outcomes"] if outcome["seq"] >= 1000]
    assert sorted(told) == [outcome.seq for outcome in flood]
