"""The port's guarantees, demanded of every implementation in the same words."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from diloco_cli.errors import StoreError
from diloco_cli.store import port, transfers
from diloco_cli.store.port import BadKeyError, Created, Exists, Store, StoreUnavailableError
from tests.contract.conftest import IN_PROCESS, REMOTE, Backend
from tests.contract.racers import race_in_processes

NUM_THREADS = 8
NUM_PROCESSES = 4
MEGABYTE = 1 << 20
ROOT = Path(__file__).resolve().parents[2]

BAD_KEYS = [
    "", ".", "..", "/", "/etc/passwd", "a/", "a//b", "a/../b", "../a", "./a", "a/..", "a b", "a\n", "a\x00b",
    "a\x1b[31m", "ä", "a\\b", "a:b", "~a", "a?b", "a#b", "a%2e", "a*",
    "-/\u2215", "x" * 201, "/".join(["x" * 99] * 10),
]  # fmt: skip


def test_a_created_object_holds_its_bytes_and_is_seen_at_once_by_another_client(backend: Backend) -> None:
    writer, reader = backend.open_again(), backend.open_again()
    for number, data in enumerate([b"", b"x", bytes(range(256)) * 5000, b"--==0==--\r\n\r\n"]):
        key = f"some/where/{number}"
        assert writer.create(key, data) == Created()
        assert reader.get(key) == data


def test_a_second_creator_gets_the_holders_bytes_and_changes_nothing(store: Store) -> None:
    assert store.create("k", b"first") == Created()
    assert store.create("k", b"second") == Exists(b"first")
    assert store.create("k", b"") == Exists(b"first")
    assert store.get("k") == b"first"


def test_the_same_bytes_under_the_same_key_are_ones_own_success(backend: Backend) -> None:
    assert backend.open_again().create("k", b"mine") == Created()
    assert backend.open_again().create("k", b"mine") == Created()


def test_of_eight_racing_threads_exactly_one_wins_each_round(backend: Backend) -> None:
    num_rounds = min(100, backend.num_rounds)
    barrier = threading.Barrier(NUM_THREADS)
    store = backend.open_again()

    def race(me: int) -> list[Created | Exists]:
        outcomes = []
        for number in range(num_rounds):
            barrier.wait(20)
            outcomes.append(store.create(f"race/{number:06d}", f"{me} of {number}".encode() * 100))
        return outcomes

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        by_thread = list(pool.map(race, range(NUM_THREADS)))
    for number, outcomes in enumerate(zip(*by_thread, strict=True)):
        held = store.get(f"race/{number:06d}")
        winners = [me for me, outcome in enumerate(outcomes) if outcome == Created()]
        assert len(winners) == 1
        assert held == f"{winners[0]} of {number}".encode() * 100
        assert all(outcome in (Created(), Exists(held)) for outcome in outcomes)


def test_of_four_racing_processes_exactly_one_wins_each_round(backend: Backend) -> None:
    if backend.url is None:
        pytest.skip("lives in one process")
    num_rounds = backend.num_rounds
    by_process = race_in_processes(backend.url, NUM_PROCESSES, num_rounds)
    assert [sum(outcomes) for outcomes in zip(*by_process, strict=True)] == [1] * num_rounds


def test_readers_see_nothing_or_the_whole_object_while_it_is_created(backend: Backend) -> None:
    num_objects = 10
    store = backend.open_again()
    torn: list[str] = []
    done = threading.Event()

    def read() -> None:
        reader = backend.open_again()
        while not done.is_set():
            for number in range(num_objects):
                data = reader.get(f"new/{number}")
                if data is not None and data != bytes([number]) * MEGABYTE:
                    torn.append(f"new/{number}: {len(data)} bytes")

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(num_objects):
        store.create(f"new/{number}", bytes([number]) * MEGABYTE)
    done.set()
    for thread in threads:
        thread.join()
    assert torn == []


def test_a_writer_killed_in_the_middle_leaves_whole_objects_or_none(backend: Backend) -> None:
    if backend.name not in {"gs", "s3", "az"} or backend.url is None:
        pytest.skip("nobody to kill; or a directory, which has a stricter test of its own")
    size_bytes = 1 << 20
    store = backend.open_again()
    command = [sys.executable, "-m", "tests.contract.racers", backend.url, str(size_bytes)]
    writer = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    try:
        ends_s = time.monotonic() + 30
        while not store.list("") and time.monotonic() < ends_s:
            time.sleep(0.01)
        time.sleep(random.Random(7).uniform(0.02, 0.1))
    finally:
        writer.kill()
        writer.wait()
    keys = store.list("")
    assert keys
    for key in keys:
        data = store.get(key)
        assert data is not None
        assert data == data[:1] * size_bytes, f"{key} has {len(data)} bytes"


def test_an_overwrite_is_seen_whole_or_not_at_all(backend: Backend) -> None:
    store = backend.open_again()
    store.put("hint", bytes([0]) * MEGABYTE)
    done = threading.Event()
    seen: set[bytes | None] = set()

    def read() -> None:
        while not done.is_set():
            with suppress(StoreUnavailableError):  # the S3 emulator now and then, of what is being overwritten
                seen.add(store.get("hint"))

    reader = threading.Thread(target=read)
    reader.start()
    expected = {bytes([number]) * MEGABYTE for number in range(10)}
    for data in sorted(expected):
        store.put("hint", data)
    done.set()
    reader.join()
    assert seen <= expected
    assert store.get("hint") == bytes([9]) * MEGABYTE


def test_a_missing_object_is_none_for_every_reading_verb(store: Store) -> None:
    store.create("there/a", b"x")
    for key in ("missing", "there/b", "no/such/place"):
        assert store.get(key) is None
        assert store.get_range(key, 0, 10) is None
        assert store.get_range(key, 5, 5) is None
        assert store.stat(key) is None


def test_of_an_object_longer_than_the_bound_one_byte_more_is_read(store: Store) -> None:
    data = os.urandom(MEGABYTE)
    store.put("k", data)
    store.put("empty", b"")
    for max_bytes in (0, 1, 1_000, MEGABYTE - 1):
        assert store.get("k", max_bytes) == data[: max_bytes + 1]
        assert store.get("empty", max_bytes) == b""
        assert {type(store.get(key, max_bytes)) for key in ("k", "empty")} == {bytes}, "not what a client made of it"
        assert store.get("missing", max_bytes) is None
    for max_bytes in (MEGABYTE, MEGABYTE + 1, 1 << 40):
        assert store.get("k", max_bytes) == data
    assert {type(store.get(key, bound)) for key in ("k", "empty") for bound in (None, MEGABYTE)} == {bytes}


def test_a_create_reads_no_more_of_what_it_lost_to_than_a_record_may_hold(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "HOLDER_BYTES", 1_000)
    theirs = os.urandom(5_000)
    store.put("k", theirs)
    assert store.create("k", b"mine") == Exists(theirs[:1_001])
    assert store.create("k", theirs[:4_999]) == Exists(theirs)
    assert store.create("k", theirs) == Created()


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 10, b"0123456789"), (0, 1, b"0"), (3, 7, b"3456"), (8, 99, b"89"), (10, 20, b""), (50, 60, b""),
     (4, 4, b""), (7, 3, b""), (-5, 2, b"01")],
)  # fmt: skip
def test_a_range_is_clipped_to_the_object(store: Store, start: int, end: int, expected: bytes) -> None:
    store.create("digits", b"0123456789")
    assert store.get_range("digits", start, end) == expected


def test_listing_is_in_lexical_order_and_honours_prefix_after_and_limit(store: Store) -> None:
    keys = ["a", "a-b", "a.b", "ab/c", "ab/c0", "ab/d/e", "ab/d.e", "ab0", "b/1", "b/10", "b/2", "c"]
    for key in reversed(keys):
        store.create(key, b"x")
    assert store.list("") == sorted(keys)
    for prefix in ("", "a", "ab", "ab/", "ab/c", "ab/d", "b/1", "b/10", "nothing", "no/thing", "c", "c/"):
        matching = [key for key in sorted(keys) if key.startswith(prefix)]
        assert store.list(prefix) == matching
        for after in ("", "a", "a.", "ab", "ab/", "ab/c", "ab/d/e", "ab/dz", "b", "b/10", "zzz"):
            behind = [key for key in matching if key > after]
            assert store.list(prefix, after) == behind
            if prefix in ("", "ab/"):
                assert store.list(prefix, after, 2) == behind[:2]
    assert store.list("", limit=0) == []


def test_a_listing_can_be_walked_page_by_page(store: Store) -> None:
    keys = [f"commit/{number:012d}.json" for number in range(50)]
    for key in keys:
        store.create(key, b"x")
    walked: list[str] = []
    while page := store.list("commit/", walked[-1] if walked else "", limit=7):
        walked += page
    assert walked == keys


def test_a_listing_shows_what_another_client_created_meanwhile(backend: Backend) -> None:
    mine, other = backend.open_again(), backend.open_again()
    assert (mine.list("l/"), mine.stat("l/1"), mine.get("l/1")) == ([], None, None)
    other.create("l/1", b"x")
    assert mine.list("l/") == ["l/1"]  # no cache in between, although the place was looked at before
    assert mine.get("l/1") == b"x"


def test_a_listing_forgets_what_was_deleted(store: Store) -> None:
    store.create("d/1", b"x")
    store.create("d/2", b"x")
    store.delete("d/1")
    assert store.list("d/") == ["d/2"]


def test_delete_may_be_repeated_and_frees_the_key(store: Store) -> None:
    store.delete("never/was")
    store.create("k", b"old")
    store.delete("k")
    store.delete("k")
    assert store.get("k") is None
    assert store.create("k", b"new") == Created()


def test_stat_tells_size_and_a_time_that_moves_on(store: Store) -> None:
    store.create("k", b"12345")
    first = store.stat("k")
    store.put("k", b"123")
    second = store.stat("k")
    assert first is not None
    assert second is not None
    assert (first.key, first.size_bytes, second.size_bytes) == ("k", 5, 3)
    assert 0 <= second.modified_s - first.modified_s < 60


@pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
def test_a_bad_key_is_refused_by_every_verb(store: Store, key: str) -> None:
    verbs: list[Callable[[], object]] = [
        lambda: store.create(key, b"x"),
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.put(key, b"x"),
        lambda: store.delete(key),
        lambda: store.stat(key),
    ]
    for verb in verbs:
        with pytest.raises(BadKeyError) as refused:
            verb()
        assert isinstance(refused.value, StoreError)
        assert refused.value.message.isprintable()


@pytest.mark.parametrize("prefix", ["/", "/a", "../", "a/../", "a//", "a\n", "\x1b", "*"], ids=ascii)
def test_a_bad_prefix_is_refused(store: Store, prefix: str) -> None:
    with pytest.raises(BadKeyError):
        store.list(prefix)


def test_an_object_that_changes_while_its_parts_come_is_never_mixed(
    backend: Backend, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is of the version that the first answer named: a mixture is refused, not returned."""
    if backend.name not in REMOTE:
        pytest.skip("no parts here")
    monkeypatch.setattr(transfers, "PART_BYTES", 100)
    monkeypatch.setattr(transfers, "pause_s", lambda attempt, error, jitter: 0.0)
    versions = [bytes([number]) * 1000 for number in (1, 2)]
    store.put("k", versions[0])
    original = transfers.in_parallel

    async def change_before_the_parts(parts: object, at_once: int) -> object:
        await asyncio.to_thread(store.put, "k", versions[1])
        return await original(parts, at_once)

    monkeypatch.setattr(transfers, "in_parallel", change_before_the_parts)
    with pytest.raises(StoreUnavailableError, match="changed"):
        store.get("k")
    monkeypatch.undo()
    assert store.get("k") == versions[1]


@pytest.mark.parametrize("size", [50_000_000, pytest.param(1_000_000_000, marks=pytest.mark.long)])
def test_a_large_object_goes_up_and_comes_down_in_parts(backend: Backend, store: Store, size: int) -> None:
    if backend.name in IN_PROCESS:
        pytest.skip("a dictionary")
    data = os.urandom(1_000_000) * (size // 1_000_000)
    store.create("large", data)
    assert store.get("large") == data
    assert store.get_range("large", size - 5, size + 5) == data[-5:]
    store.delete("large")
