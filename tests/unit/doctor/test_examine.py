"""The doctor finds what is wrong with a store, under the right name, and nothing wrong with a good one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from diloco_cli.doctor import examine as doctor
from diloco_cli.doctor.examine import (
    Check,
    Effort,
    Examination,
    Place,
    PromiseBrokenError,
    RaceAnswer,
    examine,
    fault_of_round,
    list_after_write,
    retention_finding,
    skew_finding,
)
from diloco_cli.store.bucket import Retention
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import ObjectStat, Store
from diloco_cli.store.wrappers import Deadline
from tests.unit.doctor import broken_stores as broken

URL = "memory://examined"
SMALL = Effort(racers=4, rounds=3, reads=12, max_bytes=1_000_000)


def examined(store: Store, timeout_s: float = 60) -> Examination:
    return examine(URL, lambda check: None, timeout_s, SMALL, open_again=lambda: store)


def test_a_store_that_keeps_its_promises_passes_every_check_and_is_left_empty() -> None:
    store, heard = MemoryStore(), list[Check]()
    store.create("theirs", b"not ours to touch")
    found = examine(URL, heard.append, 60, SMALL, open_again=lambda: store)
    assert found.ok and found.checks == heard
    assert {check.level for check in found.checks} == {"pass"}
    assert [check.name for check in found.checks] == [
        "write", "read_back", "exclusive_create", "own_write", "list_after_write", "range_read",
        "delete", "clock",
        "throughput",
    ]  # fmt: skip
    assert found.up_mbps and found.down_mbps and found.latency_ms
    assert store.list("") == ["theirs"]


@pytest.mark.parametrize(
    ("store", "failed"),
    [
        (broken.ChecksThenWrites, {"exclusive_create"}),
        (broken.Overwrites, {"exclusive_create", "own_write"}),
        (broken.DisownsItsOwn, {"own_write"}),
        (broken.ShowsLosersTheirOwn, {"exclusive_create", "own_write"}),
        (broken.DropsWrites, {"read_back"}),
        (broken.TearsWrites, {"read_back"}),
        (broken.CutsLargeObjects, {"read_back"}),
        (broken.IgnoresRanges, {"range_read"}),
        (broken.RemembersAbsence, {"read_back"}),
        (broken.ShowsOldBytes, {"read_back"}),
        (broken.ListsOutOfOrder, {"list_after_write"}),
        (broken.KeepsDeleted, {"delete"}),
    ],
)
def test_a_broken_promise_is_found(
    store: Callable[[], Store], failed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LISTING_PATIENCE_S", 0.2)
    found = examined(store())
    assert not found.ok
    assert failed <= set(found.failed)
    if store not in (broken.DropsWrites, broken.CutsLargeObjects):  # these spoil what other checks write, too
        assert failed == set(found.failed)


def test_errors_in_passing_are_repeated_and_told_of_but_are_no_fault() -> None:
    store = broken.Hiccups()
    found = examined(store)
    assert found.ok and found.num_repeated >= 2 and found.last_trouble == "busy"
    assert store.list("") == []


def test_read_only_credentials_fail_to_write() -> None:
    found = examined(broken.Forbids("list"))
    assert found.failed == ["write"]
    by_name = {check.name: check for check in found.checks}
    assert not found.ok and by_name["read_back"].level == "skip" and not by_name["read_back"].ok


def test_in_a_bucket_that_does_not_exist_nothing_is_left_behind() -> None:
    found = examined(broken.NoBucket())
    assert found.failed == ["write"] and found.left_behind == []


def test_a_learners_credentials_pass_with_warnings_and_what_they_cannot_delete_is_named() -> None:
    store = broken.Forbids("create", "list")
    found = examined(store)
    by_name = {check.name: check for check in found.checks}
    assert found.ok and by_name["delete"].level == "warn"
    assert "a syncer and `diloco gc` must" in by_name["delete"].hint
    assert by_name["read_back"].level == "warn" and "no heartbeats" in by_name["read_back"].hint
    assert set() < set(store.list("")) <= set(found.left_behind)


def test_a_store_that_never_answers_ends_in_time() -> None:
    class Hangs(MemoryStore):
        def create(self, key: str, data: bytes) -> None:  # type: ignore[override]
            threading.Event().wait(30)

    found = examined(Hangs(), timeout_s=0.9)
    assert found.failed == ["write"]
    assert "no answer within 900 ms" in found.checks[0].detail
    assert {check.level for check in found.checks[1:]} == {"skip"}


def place_in(store: Store) -> Place:
    return Place(lambda: store, URL, Deadline(60))


def test_listings_that_never_show_what_was_written_fail_and_late_ones_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as impatient, pytest.raises(PromiseBrokenError, match="0 of 20"):
        impatient.setattr(doctor, "LISTING_PATIENCE_S", 0.2)
        list_after_write(place_in(broken.ListsLate()))

    class ListsAfterAWhile(MemoryStore):
        looks = 0

        def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
            self.looks += 1
            return super().list(prefix, after, limit) if self.looks > 2 else []

    assert list_after_write(place_in(ListsAfterAWhile())).level == "warn"


@pytest.mark.parametrize(
    ("modified_s", "level", "said"),
    [
        (1000.5, "pass", "within 1 s"),
        (999.0, "pass", "within 1 s"),  # a store that tells whole seconds
        (1004.0, "pass", "within 3 s"),
        (1061.0, "warn", "60 s ahead of"),
        (940.0, "warn", "60 s behind"),
        (2801.0, "warn", "30 min ahead of"),
    ],
)
def test_a_clock_is_judged_by_how_far_it_lies_outside_of_the_write(modified_s: float, level: str, said: str) -> None:
    found = skew_finding(ObjectStat("k", 1, modified_s), before_s=1000.0, after_s=1001.0)
    assert (found.level, said in found.detail) == (level, True)
    assert ("refused" in found.hint) == (abs(modified_s - 1000) > 300)


def test_what_is_kept_for_a_week_costs_seven_days_of_writing() -> None:
    week = retention_finding(Retention(604_800, "turn it off"), 1000.0)
    assert week.level == "warn" and "$140.00 a month for this run's 1 TB a day" in week.detail
    assert "7 d" in week.detail and "turn it off" in week.hint
    assert retention_finding(Retention(0, ""), 1000.0).level == "pass"
    assert "until it is removed for good" in retention_finding(Retention(None, "x"), None).detail


A, B = b"a's bytes", b"b's bytes"
WON = RaceAnswer(True, A)
LOST = RaceAnswer(False, A)
MUTE = RaceAnswer(False, trouble="no answer")


@pytest.mark.parametrize(
    ("answers", "final", "fault"),
    [
        ([WON, LOST], A, ""),
        ([WON, MUTE], A, ""),
        ([MUTE, LOST], A, ""),  # the one without an answer has won
        ([WON, RaceAnswer(True, B)], B, "2 of 2 racers were told"),
        ([LOST, LOST], A, "no racer was told"),
        ([WON, LOST], B, "a loser's bytes"),
        ([WON, RaceAnswer(False, B)], A, "other bytes than the winner's"),
        ([WON, LOST], None, "is not there"),
        ([WON, LOST], b"torn", "no racer wrote"),
    ],
)
def test_a_round_is_right_if_one_wins_and_all_agree(answers: list[RaceAnswer], final: bytes | None, fault: str) -> None:
    found = fault_of_round([A, B], answers, final)
    assert fault in found if fault else found == ""
