"""Short histories see what only long runs do: constants of the protocol are smaller there."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from diloco_cli.protocol.actors import syncer
from diloco_cli.protocol.log import commit_log as log
from diloco_cli.protocol.log.keys import read_snapshot_piece_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import MAX_EXACT, RunFormat
from diloco_cli.protocol.log.snapshots import PIECE_BYTES
from tests.histories.campaign import lived, swarm
from tests.histories.client import Bucket
from tests.histories.memo import tuned
from tests.histories.options import drawn_options

SEEDS = range(40)
COMPRESSED_HISTORIES = 6
PIECED_HISTORIES = 12


def test_readers_on_a_long_way_look_for_newer_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint that is lost or old shows by the length of the way, in the histories of the swarm as they are."""
    calls: Counter[str] = Counter()
    newest_snapshot = log.newest_snapshot

    def counted(run: RunFormat, beyond: int, before: int = MAX_EXACT) -> Steps[Any]:
        caller = sys._getframe(1).f_code.co_name
        found = yield from newest_snapshot(run, beyond, before)
        calls[f"{caller}, {'found' if found else 'none'}"] += 1
        return found

    monkeypatch.setattr(log, "newest_snapshot", counted)
    assert not swarm(SEEDS).violations
    print(dict(calls))
    assert calls["read_log, found"] >= len(SEEDS) // 4 and calls["read_log, none"] > 0


def test_every_constant_of_a_history_is_tuned_wherever_it_is_known() -> None:
    constants = drawn_options(0).constants
    every, way = log.SNAPSHOT_EVERY, log.LONG_WAY
    with tuned(**constants):
        assert log.SNAPSHOT_EVERY == syncer.SNAPSHOT_EVERY == constants["SNAPSHOT_EVERY"] != every
        assert way // every == log.LONG_WAY // log.SNAPSHOT_EVERY, "one follows from the other"
    assert (every, way) == (log.SNAPSHOT_EVERY, log.LONG_WAY)


def test_a_constant_that_no_module_has_is_an_error() -> None:
    with pytest.raises(AttributeError, match="SNAPSHOTS_NEVER"), tuned(SNAPSHOT_EVERY=3, SNAPSHOTS_NEVER=3):
        raise NotImplementedError
    assert log.SNAPSHOT_EVERY > 3


def test_histories_compress_short_records_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    get = Bucket.get

    def counted(self: Bucket, key: str, max_bytes: int | None = None) -> bytes | None:
        data = get(self, key, max_bytes)
        seen[key.partition("/")[0]] += data is not None and data[:1] == b"x"
        return data

    monkeypatch.setattr(Bucket, "get", counted)
    seeds = [seed for seed in range(200) if drawn_options(seed).plain_bytes == 0][:COMPRESSED_HISTORIES]
    assert not [seed for seed in seeds if lived(seed, drawn_options(seed)).violation]
    assert min(seen["commit"], seen["offer"], seen["snapshot"]) > len(seeds)


def test_snapshots_in_pieces_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, read by restarts and newcomers, and collected."""
    seen: Counter[str] = Counter()
    get, delete = Bucket.get, Bucket.delete

    def counted_get(self: Bucket, key: str, max_bytes: int | None = None) -> bytes | None:
        data = get(self, key, max_bytes)
        seen["read"] += data is not None and read_snapshot_piece_key(key) is not None
        return data

    def counted_delete(self: Bucket, key: str) -> None:
        seen["deleted"] += read_snapshot_piece_key(key) is not None
        delete(self, key)

    monkeypatch.setattr(Bucket, "get", counted_get)
    monkeypatch.setattr(Bucket, "delete", counted_delete)
    seeds = [seed for seed in range(200) if drawn_options(seed).piece_bytes < PIECE_BYTES][:PIECED_HISTORIES]
    assert not [seed for seed in seeds if lived(seed, drawn_options(seed)).violation]
    print(dict(seen))
    assert min(seen["read"], seen["deleted"]) > len(seeds)
