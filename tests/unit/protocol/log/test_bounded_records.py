"""No record of the log becomes too long for one, and a snapshot that would be is not written."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.protocol.actors.inbox import MAX_OUTCOMES_A_COMMIT, Inbox
from diloco_cli.protocol.log import wire
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.records import Outcome
from diloco_cli.protocol.log.snapshots import write_snapshot
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import encode
from diloco_cli.runtime.driver import SystemClock, perform
from diloco_cli.store.memory import MemoryStore
from tests.simulation.bucket_check import commits_of
from tests.simulation.operated import request, started
from tests.simulation.toy import make_run
from tests.unit.protocol.records import RUN, commit, genesis

CLOCK = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)


def test_what_is_too_much_for_one_commit_goes_with_the_next_in_the_order_of_arrival() -> None:
    inbox = Inbox(RUN)
    flood = [Outcome("l1", 1, seq, 0, "bad_signature") for seq in range(2 * MAX_OUTCOMES_A_COMMIT)]
    inbox.outcomes = [*flood, Outcome("l0", 1, 0, 0, "norm_cap")]
    taken: list[Any] = [inbox.take_outcomes() for _ in range(4)]
    assert [len(outcomes) for outcomes in taken] == [MAX_OUTCOMES_A_COMMIT, MAX_OUTCOMES_A_COMMIT, 1, 0]
    assert taken[0] == tuple(flood[:MAX_OUTCOMES_A_COMMIT]) and taken[2][0].learner == "l0"
    longest = Outcome("l" * 63, 10**7, 10**9, 10**4, "digest_mismatch")
    record = encode(commit(genesis(), "refuse", outcomes=(longest,) * MAX_OUTCOMES_A_COMMIT))
    assert len(record) < wire.MAX_RECORD_BYTES / 4


def test_a_state_too_long_for_a_record_is_read_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    first = commit(RunState(), "epoch_start", outputs=genesis().outputs)
    store.create("commit/000000000000.json", encode(first))
    state = perform(read_log(RUN), store, CLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(wire, "MAX_RECORD_BYTES", 1000)
        perform(write_snapshot(RUN, state), store, CLOCK)
    assert store.list("snapshot/") == store.list("hint/") == []
    assert perform(read_log(RUN), store, CLOCK) == state
    perform(write_snapshot(RUN, state), store, CLOCK)
    assert len(store.list("snapshot/")) == 1


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
