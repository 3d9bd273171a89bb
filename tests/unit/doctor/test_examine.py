"""The doctor finds what is wrong with a store, under the right name, and nothing wrong with a good one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from diloco_cli.doctor import checks
from diloco_cli.doctor.examine import Check, Effort, Examination, examine
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from tests.unit.doctor import broken_stores as broken

URL = "memory://examined"
SMALL = Effort(racers=4, rounds=3, processes=0, reads=12, max_bytes=1_000_000)


def examined(store: Store, timeout_s: float = 60) -> Examination:
    return examine(URL, lambda check: None, timeout_s, SMALL, open_again=lambda: store)


def test_a_store_that_keeps_its_promises_passes_every_check_and_is_left_empty() -> None:
    store, heard = MemoryStore(), list[Check]()
    store.create("theirs", b"not ours to touch")
    found = examine(URL, heard.append, 60, SMALL, open_again=lambda: store)
    assert found.ok and found.checks == heard
    assert {check.level for check in found.checks} == {"pass"}
    assert [check.name for check in found.checks] == [
        "write", "read_back", "upload_check", "exclusive_create", "own_write", "list_after_write", "range_read",
        "delete", "clock",
        "throughput", "permissions",
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
    monkeypatch.setattr(checks, "LISTING_PATIENCE_S", 0.2)
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


def test_read_only_credentials_fail_to_write_and_are_told_what_they_may_do() -> None:
    found = examined(broken.Forbids("list"))
    assert found.failed == ["write"]
    by_name = {check.name: check for check in found.checks}
    assert not found.ok and by_name["read_back"].level == "skip" and not by_name["read_back"].ok
    assert by_name["permissions"].detail == "read, list: not enough for a run"


def test_a_learners_credentials_pass_with_warnings_and_what_they_cannot_delete_is_named() -> None:
    store = broken.Forbids("create", "list")
    found = examined(store)
    by_name = {check.name: check for check in found.checks}
    assert found.ok and by_name["delete"].level == "warn"
    assert by_name["permissions"].detail == "create, read, list: enough for a learner"
    assert "a syncer also needs delete" in by_name["permissions"].hint
    assert set() < set(store.list("")) <= set(found.left_behind)


def test_a_store_that_never_answers_ends_in_time() -> None:
    class Hangs(MemoryStore):
        def create(self, key: str, data: bytes) -> None:  # type: ignore[override]
            threading.Event().wait(30)

    found = examined(Hangs(), timeout_s=0.9)
    assert found.failed == ["write"]
    assert "no answer within 900 ms" in found.checks[0].detail
    assert {check.level for check in found.checks[1:]} == {"skip"}
