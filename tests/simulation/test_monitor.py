"""How long offers and requests may wait for an answer without faults, and how often others' objects are read."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext

import pytest

from diloco_cli.protocol.actors.joins import JUNK_PER_LOOK
from diloco_cli.protocol.log.keys import SYNCER, join_key
from tests.histories.client import Bucket
from tests.histories.genuine import SEEN_A_LOOK, TIMES, ForeignReads
from tests.histories.history import History
from tests.histories.monitor import (
    ANSWER_MERGES,
    ANSWER_S,
    OUTCOME_APART_S,
    OUTCOME_ROUNDS,
    OUTCOME_S,
    Monitor,
)
from tests.histories.options import drawn_options
from tests.histories.replayer import OfferId, Plain, ViolationError
from tests.simulation.toy import make_run

REFUSAL = {
    "n": 0, "kind": "refuse", "inputs": [], "request": None,
    "outcomes": [{"learner": "l0", "incarnation": 1, "seq": 0, "reason": "late"}],
}  # fmt: skip
ROUNDS = OUTCOME_ROUNDS + 1  # of one fragment; one merge more is too late


class MonitorBooks:
    """In a replayer's place: it takes every commit for sound."""

    def __init__(self) -> None:
        self.n, self.merges, self.slot, self.epoch = -1, 0, 0, 1
        self.floors: Counter[str] = Counter()
        self.revoked: set[str] = set()
        self.batches: dict[str, int] = {}
        self.settled: dict[OfferId, str] = {}

    def feed(self, data: bytes) -> Plain:
        commit: Plain = json.loads(data)
        self.n, self.merges = self.n + 1, self.merges + (commit["kind"] == "merge")
        self.slot += commit["kind"] in ("merge", "skip")
        return commit


@pytest.fixture
def monitor() -> Monitor:
    monitor = Monitor(Bucket(), make_run(fragments=1))
    monitor.replayer = MonitorBooks()  # type: ignore[assignment]
    monitor.grown_healthy(0.0)
    offers(monitor, 0, slot=0)
    return monitor


def offers(monitor: Monitor, seq: int, slot: int) -> None:
    offer = {"slot": slot, "base": 0, "inner": None, "payload_bytes": 1, "payload_digest": "digest"}
    monitor.bucket.create(f"delta/l0/00000001/{seq:010d}-digest", b"")
    monitor.created("l0", f"offer/l0/00000001/{seq:010d}.json", json.dumps(offer).encode(), 0.0)


def commits(monitor: Monitor, number: int, now_s: float, kind: str = "merge") -> None:
    for _ in range(number):
        data = json.dumps(
            {"n": monitor.replayer.n + 1, "kind": kind, "inputs": [], "outcomes": [], "request": None}
        ).encode()
        monitor.created(SYNCER, f"commit/{monitor.replayer.n + 1:012d}.json", data, now_s)


def test_an_offer_is_late_after_some_merges_and_some_time(monitor: Monitor) -> None:
    commits(monitor, ROUNDS, OUTCOME_S + 1)
    with pytest.raises(ViolationError, match=r"offer 1/0 of l0 has no outcome after 4 merges"):
        commits(monitor, 1, OUTCOME_S + 1)


@pytest.mark.parametrize(("merges", "now_s"), [(ROUNDS, 10 * OUTCOME_S), (10 * ROUNDS, OUTCOME_S)])
def test_it_is_not_late_after_one_of_both(monitor: Monitor, merges: int, now_s: float) -> None:
    commits(monitor, merges, now_s)


@pytest.mark.parametrize("faults_cease", [False, True])
def test_an_offer_for_a_later_slot_has_the_merges_until_then_besides(monitor: Monitor, faults_cease: bool) -> None:
    monitor.created(SYNCER, "commit/000000000000.json", json.dumps(REFUSAL).encode(), 0.0)
    offers(monitor, 1, slot=5)
    if faults_cease:
        monitor.grown_healthy(0.0)
    commits(monitor, 5 + ROUNDS, OUTCOME_S + 1)
    with pytest.raises(ViolationError, match=r"offer 1/1 of l0 has no outcome after 4 merges"):
        commits(monitor, 1, OUTCOME_S + 1)


def test_time_without_a_syncer_makes_nothing_late_and_the_next_one_has_its_own(monitor: Monitor) -> None:
    """A run that was stopped before an offer was found, and is resumed later: the new syncer looks for it."""
    commits(monitor, ROUNDS + 1, 1.0)
    commits(monitor, 1, 1.0, "stop")
    commits(monitor, 1, 60.0, "epoch_start")
    commits(monitor, ROUNDS + 1, 60.0 + OUTCOME_S)
    with pytest.raises(ViolationError, match=r"offer 1/0 of l0 has no outcome after 5 merges"):
        commits(monitor, 1, 61.0 + OUTCOME_S)


def test_the_next_syncer_has_some_merges_of_its_own(monitor: Monitor) -> None:
    commits(monitor, ROUNDS + 1, 1.0)
    commits(monitor, 1, 60.0, "epoch_start")
    commits(monitor, ROUNDS, 61.0 + OUTCOME_S)


def test_the_end_has_a_outcome_for_what_a_syncer_could_find(monitor: Monitor) -> None:
    monitor.last_look_s = lambda: 2.0
    commits(monitor, 1, 1.0)
    commits(monitor, 1, 1.9, "finish")
    with pytest.raises(ViolationError, match=r"offer 1/0 of l0 has no outcome, 2\.10 s before the end"):
        commits(monitor, 1, 2.1, "finish")


def test_a_syncer_needs_time_for_the_mailboxes_of_those_that_have_joined() -> None:
    history = History(0, drawn_options(0))
    alone_s = history.monitor.last_look_s()
    history.roles.append("n0")
    assert history.monitor.last_look_s() > alone_s


# -- a region of its own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_s", [-0.1, 0.1])
def test_an_offer_that_is_carried_home_has_the_time_of_those_that_are_carried_before_it(
    monitor: Monitor, late_s: float
) -> None:
    monitor.lives_apart({"l0"}, Bucket())
    monitor.carries_s = 30.0
    now_s = OUTCOME_APART_S + 30.0 + late_s
    with pytest.raises(ViolationError, match="offer 1/0 of l0") if late_s > 0 else nullcontext():
        commits(monitor, ROUNDS + 1, now_s)


# -- others' objects --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0, JUNK_PER_LOOK])
def test_a_wish_to_join_may_wait_for_as_many_looks_as_the_others_in_the_queue_take(
    monitor: Monitor, others: int
) -> None:
    monitor._fresh.clear()
    monitor.bucket.foreign |= {join_key(f"z{number}", monitor.replayer.epoch, 0) for number in range(others)}
    monitor.bucket.foreign |= {join_key(f"z{number}", 7, 0) for number in range(100)}  # to another syncer
    monitor.created("n0", join_key("n0", monitor.replayer.epoch, 0), b"{}", 0.0)
    looks = 2 if others else 0
    commits(monitor, ANSWER_MERGES + looks, 1.0)
    monitor.check_answers(0.0, 1000.0, look_s=1.5)
    commits(monitor, 1, 1.0)
    monitor.check_answers(0.0, ANSWER_S + looks * 1.5, look_s=1.5)
    with pytest.raises(ViolationError, match="the wish of n0 to join has no answer"):
        monitor.check_answers(0.0, ANSWER_S + looks * 1.5 + 0.1, look_s=1.5)


def test_a_process_may_look_at_few_objects_of_others_in_a_slot_and_not_at_one_all_the_time() -> None:
    reads = ForeignReads()
    for number in range(SEEN_A_LOOK):
        reads.read("syncer", f"junk{number}")
    reads.slot_over(0.0, learners=1)
    for number in range(SEEN_A_LOOK + 1):
        reads.read("syncer", f"junk{number}")
    with pytest.raises(ViolationError, match="syncer has read 41 objects of forgers and flooders in one slot, more"):
        reads.slot_over(0.0, learners=1)
    reads = ForeignReads()
    for _ in range(TIMES + 1):
        reads.read("syncer", "junk")
    with pytest.raises(ViolationError, match="syncer has read junk, which a forger or a flooder wrote, 17 times in 0"):
        reads.slot_over(0.0, learners=1)
