"""No record of the log becomes too long for one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from diloco_cli.protocol.actors import syncer
from diloco_cli.protocol.actors.inbox import MAX_OUTCOMES_A_COMMIT, Inbox
from diloco_cli.protocol.log import records
from diloco_cli.protocol.log.commit_log import SNAPSHOT_HOLDS, write_snapshot
from diloco_cli.protocol.log.health import LEARNERS_KEPT
from diloco_cli.protocol.log.keys import incarnation_of
from diloco_cli.protocol.log.metrics import RECENT_MERGES, LastDelta, MergeNote, Metrics
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import Outcome, RunFormat, encode
from diloco_cli.protocol.log.state import Applied, LearnerRecord, RunState
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
    assert perform(write_snapshot(RUN, many), store, CLOCK) is False
    assert store.list("snapshot/") == store.list("hint/") == []


def test_the_snapshot_of_as_many_learners_and_fragments_as_a_plan_takes_is_written() -> None:
    """In a signed run, after months."""
    fragments, incarnation, long = 40, incarnation_of(12, 1 << 39), 10**11
    offers = {fragment: Applied(10**6, 10**6, long, incarnation, 10**5) for fragment in range(fragments)}
    one = LearnerRecord(incarnation, 10**5, (), offers, long**2, 10**5, 0, long, 0.123456789)
    names = [f"island-{number}" for number in range(SNAPSHOT_HOLDS // fragments)]
    notes = (MergeNote(10**6, 10**6, "t", tuple(names), len(names), 1, 0.1, 0.1, long),) * RECENT_MERGES
    metrics = Metrics(recent_merges=notes, deltas=dict.fromkeys(names, LastDelta(1.123456789, 0.123456789)))
    norms = {fragment: dict.fromkeys(names[:LEARNERS_KEPT], (0.123456789, 24)) for fragment in range(fragments)}
    most = structs.replace(genesis(), learners=dict.fromkeys(names, one), metrics=metrics, norms=norms)
    assert perform(write_snapshot(RUN, most), MemoryStore(), CLOCK)
    much = structs.replace(most, learners=dict.fromkeys([*names, *(f"{name}b" for name in names[::4])], one))
    assert not perform(write_snapshot(RUN, much), MemoryStore(), CLOCK)


def test_a_syncer_says_once_that_the_log_has_outgrown_its_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(run: RunFormat, state: RunState) -> Steps[bool]:
        yield from ()
        return False

    monkeypatch.setattr(syncer, "SNAPSHOT_EVERY", 3)
    monkeypatch.setattr(syncer, "write_snapshot", too_long)
    fleet = started(make_run(merges=20), 3)
    fleet.finish()
    commits = commits_of(fleet.world.store)
    assert [commit["reason"] for commit in commits].count(syncer.NO_SNAPSHOTS) == 1 and commits[-1]["kind"] == "finish"


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
