"""A log in a cloud's bucket: many reads at a time, and still each commit once, in order."""

from __future__ import annotations

import pytest

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.config.settings import MAX_CONNECTIONS
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES
from diloco_cli.runtime.commits_ahead import CommitsAhead
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import StoreUnavailableError
from diloco_cli.store.wan import EmulatedLink
from diloco_cli.store.wrapper import MeteredStore

COMMITS = 400


def log(commits: int = COMMITS) -> MemoryStore:
    store = MemoryStore()
    for n in range(commits):
        store.create(commit_key(n), str(n).encode())
    return store


def numbers(ahead: CommitsAhead, first: int, last: int) -> list[bytes | None]:
    return [ahead.get(commit_key(n), MAX_RECORD_BYTES) for n in range(first, last + 1)]


def test_where_a_read_takes_its_time_many_are_under_way_and_none_beyond_the_last() -> None:
    meter = MeteredStore(EmulatedLink(log(), None, None, rtt_s=0.04))
    began_s = monotonic_s()
    with CommitsAhead(meter, last=COMMITS - 2) as ahead:
        assert numbers(ahead, 0, COMMITS - 2) == [str(n).encode() for n in range(COMMITS - 1)]
    assert monotonic_s() - began_s < 0.04 * COMMITS / 5
    assert meter.counts.requests["get"] == COMMITS - 1


def test_in_a_directory_nothing_is_read_that_was_not_asked_for() -> None:
    meter = MeteredStore(log())
    with CommitsAhead(meter) as ahead:
        assert numbers(ahead, 5, COMMITS)[-1] is None
    assert meter.counts.requests["get"] == COMMITS - 4


def test_past_the_end_of_a_log_it_reads_no_more_than_it_had_read() -> None:
    meter = MeteredStore(EmulatedLink(log(10), None, None, rtt_s=0.04))
    with CommitsAhead(meter) as ahead:
        assert numbers(ahead, 0, 10)[-1] is None
    assert meter.counts.requests["get"] <= 11 + 10 < 11 + MAX_CONNECTIONS


def test_a_commit_that_is_asked_for_again_is_read_again() -> None:
    store = log()
    with CommitsAhead(EmulatedLink(store, None, None, rtt_s=0.04)) as ahead:
        numbers(ahead, 0, 20)
        store.put(commit_key(20), b"whole")
        assert ahead.get(commit_key(20), MAX_RECORD_BYTES) == b"whole"
        store.put(commit_key(3), b"other")
        assert numbers(ahead, 3, 4) == [b"other", b"4"]


def test_an_error_of_a_read_is_the_readers() -> None:
    class NinthFails(MemoryStore):
        def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
            sleep_s(0.04)
            if key == commit_key(9):
                raise StoreUnavailableError("503")
            return b"{}"

    with CommitsAhead(NinthFails()) as ahead, pytest.raises(StoreUnavailableError):
        assert numbers(ahead, 0, 8) == [b"{}"] * 9
        ahead.get(commit_key(9), MAX_RECORD_BYTES)
