"""No record of the log becomes too long for one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from diloco_cli.protocol.actors.inbox import MAX_OUTCOMES_A_COMMIT, Inbox
from diloco_cli.protocol.log import records
from diloco_cli.protocol.log.commit_log import write_snapshot
from diloco_cli.protocol.log.records import Outcome, encode
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


def test_a_state_too_long_for_a_record_gets_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    many = structs.replace(genesis(), revoked={f"{key:064x}": key for key in range(130_000)})
    perform(write_snapshot(RUN, many), store, CLOCK)
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
