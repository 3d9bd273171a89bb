"""Gaps, and what a process that holds a record does about a bucket that has lost it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.errors import FencedError
from diloco_cli.protocol.log.commit_log import fold, read_format, read_log, write_snapshot
from diloco_cli.protocol.log.heartbeats import SyncerHeartbeat, sealed
from diloco_cli.protocol.log.keys import FORMAT_KEY, HEAD_HINT_KEY, SYNCER, commit_key, heartbeat_key
from diloco_cli.protocol.log.mending import GapError, Mender, mended, whole_log
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import COMMITS_KEPT, RecordError, RunFormat, encode, record_digest
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import LOG, OPERATOR, UNSIGNED, Checksummed, Unsigned
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import StoreForbiddenError
from tests.unit.protocol.records import commit, genesis, make_run

CLOCK = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)


def log_of(commits: int, keyring: Unsigned | None = None, named: bool = True) -> tuple[RunFormat, MemoryStore]:
    """A run as its syncer has it, and its bucket."""
    keyring = keyring or Checksummed("id")
    run = replace(make_run(), checksums=keyring is not UNSIGNED, keyring=keyring)
    bucket, state = MemoryStore(), RunState()
    run.keep(FORMAT_KEY, keyring.sign(OPERATOR, FORMAT_KEY, encode(run)))
    bucket.create(FORMAT_KEY, run.kept[FORMAT_KEY])
    for n in range(commits):
        begins = {"outputs": genesis().outputs, "format": run.format_digest if named else ""}
        fields: dict[str, Any] = {"slot": state.slot} if n else begins
        data = keyring.sign(LOG, commit_key(n), encode(commit(state, "skip" if n else "epoch_start", **fields)))
        bucket.create(commit_key(n), data)
        state = fold(run, state, data)
        run.keep(commit_key(n), data)
    return run, bucket


def done(steps: Steps[Any], bucket: MemoryStore) -> Any:
    return perform(steps, bucket, CLOCK)


def opened(bucket: MemoryStore) -> RunFormat:
    run: RunFormat = done(read_format("run"), bucket)
    return run


@pytest.mark.parametrize("missing", [range(1), range(19, 20), range(3, 30)], ids=str)
def test_missing_commits_are_not_the_end(missing: range) -> None:
    run, bucket = log_of(31)
    for n in missing:
        bucket.delete(commit_key(n))
    with pytest.raises(GapError) as caught:
        done(whole_log(opened(bucket)), bucket)
    error = caught.value
    assert error.where == commit_key(missing[0]) and f"commit {missing[-1] + 1} was written after it" in str(error)
    assert error.wants == tuple(map(commit_key, missing))[:16]
    assert "learner or standby" in (error.hint or "")
    for key in error.wants:
        done(mended(run, RunState(), key), bucket)
    rest = [commit_key(n) for n in missing[16:]]
    assert all(bucket.get(key) == run.kept[key] for key in map(commit_key, missing) if key not in rest)


def test_what_a_stranger_has_left_behind_the_end_is_no_gap() -> None:
    _, bucket = log_of(5)
    bucket.create(commit_key(9), b"junk")
    bucket.create(commit_key(7), bucket.get(commit_key(3)) or b"")
    bucket.put(heartbeat_key(SYNCER), encode(SyncerHeartbeat("SERVING", 1, 99, "host")))
    assert done(whole_log(opened(bucket)), bucket).n == 4


def test_the_syncer_before_has_said_how_far_the_log_went() -> None:
    run, bucket = log_of(5)
    key = heartbeat_key(SYNCER)
    bucket.put(key, sealed(run.keyring, LOG, key, SyncerHeartbeat("SERVING", 1, 7, "host")))
    with pytest.raises(GapError, match="commit 7 was written after it: 5 to 6 must be put back"):
        done(whole_log(opened(bucket)), bucket)


HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda data: None,
    "flipped": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "truncated": lambda data: data[:-7],
    "a page": lambda data: b"<html>",
}


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("key", [FORMAT_KEY, commit_key(0), commit_key(9)])
def test_who_holds_a_record_puts_back_the_same_bytes(key: str, how: str) -> None:
    run, bucket = log_of(10)
    state, before = done(read_log(run), bucket), bucket.get(key) or b""
    assert done(mended(run, state, key), bucket) == ""
    harmed = HARMS[how](before)
    bucket.delete(key) if harmed is None else bucket.put(key, harmed)
    assert f"was {'missing' if harmed is None else 'damaged'}: put back" in done(mended(run, state, key), bucket)
    assert bucket.get(key) == before


def test_a_sound_record_of_another_process_is_never_replaced() -> None:
    run, bucket = log_of(10)
    other = run.keyring.sign(LOG, commit_key(9), encode(commit(RunState(n=8, digest="other"), "skip", slot=0)))
    bucket.put(commit_key(9), other)
    assert done(mended(run, RunState(), commit_key(9)), bucket) == "" and bucket.get(commit_key(9)) == other


def test_a_process_that_may_not_write_there_says_so_and_goes_on() -> None:
    run, bucket = log_of(10)
    bucket.delete(commit_key(4))

    def refuse(key: str, data: bytes) -> Any:
        raise StoreForbiddenError("403")

    bucket.create = refuse  # type: ignore[method-assign]
    said = perform(mended(run, RunState(), commit_key(4)), bucket, CLOCK, tries_once=bucket)
    assert said == f"{commit_key(4)} was missing: cannot be put back by this process: the store has refused it"


def test_a_process_holds_the_format_and_the_newest_commits() -> None:
    _, bucket = log_of(100)
    run = opened(bucket)
    done(read_log(run), bucket)
    assert set(run.kept) == {FORMAT_KEY, *(commit_key(n) for n in range(100 - COMMITS_KEPT, 100))}
    assert all(bucket.get(key) == data for key, data in run.kept.items())


@pytest.mark.parametrize("keyring", [UNSIGNED, Checksummed("id")], ids=["plain", "checksums"])
def test_another_format_in_the_place_of_the_runs_own_is_refused_and_put_back(keyring: Unsigned) -> None:
    """In a run that nobody signs, everybody can write a format that seems sound."""
    run, bucket = log_of(10, keyring)
    other = keyring.sign(OPERATOR, FORMAT_KEY, encode(replace(run, software="another")))
    bucket.put(FORMAT_KEY, other)
    with pytest.raises(RecordError, match=r"FORMAT.json: not the one that this run began with, which commit 0 names"):
        done(read_log(opened(bucket)), bucket)
    state = done(read_log(run), bucket)
    assert state.format == record_digest(run.kept[FORMAT_KEY])
    assert "put back" in done(mended(run, state, FORMAT_KEY), bucket)
    assert done(read_log(opened(bucket)), bucket) == state


def test_a_run_that_was_removed_stays_removed_and_another_one_in_its_place_ends_its_processes() -> None:
    run, bucket = log_of(10)
    state = done(read_log(run), bucket)
    keys = [FORMAT_KEY, *map(commit_key, range(10))]
    for key in keys:
        bucket.delete(key)
    assert not any(done(mended(run, state, key), bucket) for key in keys)
    keyring = Checksummed("new")
    bucket.create(FORMAT_KEY, keyring.sign(OPERATOR, FORMAT_KEY, encode(replace(run, run_id="new"))))
    with pytest.raises(FencedError, match="another run was begun in the place of this one"):
        done(mended(run, state, FORMAT_KEY), bucket)


def test_a_syncer_tells_of_what_vanishes_behind_it_once() -> None:
    run, bucket = log_of(100)
    told: list[str] = []
    mender, state = Mender(run, told.append), done(read_log(run), bucket)
    for now_s in range(10, 1000, 10):
        if now_s == 200:
            bucket.delete(commit_key(0))
        done(mender.serve(state, float(now_s)), bucket)
        assert bool(told) == (now_s >= 310)
    assert len(told) == 1 and "a rule of the bucket that deletes what is old (lifecycle, expiration)" in told[0]


def test_a_log_whose_beginning_is_gone_is_read_from_its_newest_snapshot() -> None:
    """As a rule of the bucket leaves it that deletes what is old; the hint may be as old."""
    run, bucket = log_of(150)
    at_128 = RunState()
    for n in range(129):
        at_128 = fold(run, at_128, bucket.get(commit_key(n)) or b"")
    done(write_snapshot(run, at_128), bucket)
    whole = done(read_log(run), bucket)
    bucket.delete(HEAD_HINT_KEY)
    for n in range(100):
        bucket.delete(commit_key(n))
    assert done(whole_log(opened(bucket)), bucket) == whole


def test_a_format_that_is_gone_is_told_from_a_run_that_never_was() -> None:
    _, bucket = log_of(3)
    bucket.delete(FORMAT_KEY)
    with pytest.raises(RecordError, match=r"run/FORMAT.json: missing, though commits of a run lie there"):
        opened(bucket)
