"""Records of a run that is not signed end with a checksum: what a bad disk or wire makes of one is never believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from diloco_cli.errors import NotFoundError
from diloco_cli.protocol.actors.requests import ask, pending_requests
from diloco_cli.protocol.log.commit_log import (
    fold,
    is_whole,
    next_commit,
    parse_format,
    patiently,
    read_format,
    read_log,
    snapshot_at,
    state_after,
    write_snapshot,
)
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key, offer_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import FORMAT_SCHEMA, Offer, RecordError, RunFormat, create_signed, decode, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import LOG, UNSIGNED, Checksummed, SignatureError
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists
from tests.unit.protocol.records import commit, genesis, make_run, offer

T = TypeVar("T")
Damages = Callable[[int, str, bytes], bytes]
RUN = replace(make_run(), checksums=True, keyring=Checksummed("id"))
SIGN = RUN.keyring.sign


def log_of(*more: str) -> MemoryStore:
    """A log of an epoch's start and some skips."""
    bucket, state = MemoryStore(), RunState()
    for kind in ("epoch_start", *more):
        fields: dict[str, Any] = {"outputs": genesis().outputs} if kind == "epoch_start" else {"slot": state.slot}
        data = SIGN(LOG, commit_key(state.n + 1), encode(commit(state, kind, **fields)))
        bucket.create(commit_key(state.n + 1), data)
        state = fold(RUN, state, data)
    return bucket


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


class DamagingStore(MemoryStore):
    """What is read comes as `damages` makes it: of which read of all, under which key, and which bytes."""

    def __init__(self, bucket: MemoryStore, damages: Damages) -> None:
        super().__init__()
        self._bucket, self._damages, self._reads = bucket, damages, 0

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        data = self._bucket.get(key, max_bytes)
        if data is None:
            return None
        self._reads += 1
        return self._damages(self._reads - 1, key, data)

    def create(self, key: str, data: bytes) -> Created | Exists:
        return self._bucket.create(key, data)


def read(steps: Steps[T], bucket: MemoryStore, damages: Damages = lambda n, key, data: data) -> T:
    return perform(steps, DamagingStore(bucket, damages), SystemClock(lambda: 0.0, lambda seconds: None, lambda: False))


def test_a_signed_record_is_the_record() -> None:
    record = offer(genesis())
    key = offer_key(*record.id)
    data = SIGN("learner/l0", key, encode(record))
    assert RUN.keyring.authenticates("learner/l0", key, data)
    assert decode(Offer, data, key) == record


def test_no_flipped_bit_passes() -> None:
    key = commit_key(0)
    data = SIGN(LOG, key, encode(commit(RunState(), "epoch_start", outputs=genesis().outputs)))
    passed = [bit for bit in range(8 * len(data)) if RUN.keyring.authenticates(LOG, key, flipped(data, bit))]
    assert passed == [], "each of the record's bits, those of the checksum too"
    assert not any(RUN.keyring.authenticates(LOG, key, data[:length]) for length in range(len(data)))


def test_a_record_of_another_key_or_run_is_not_authentic() -> None:
    data = SIGN(LOG, commit_key(3), b'{"n":3}')
    assert not RUN.keyring.authenticates(LOG, commit_key(4), data)
    assert not Checksummed("another").authenticates(LOG, commit_key(3), data)
    assert not RUN.keyring.authenticates(LOG, commit_key(3), b'{"n":3}')


@pytest.mark.parametrize("bit", range(0, 4000, 397))
def test_one_damaged_read_of_the_newest_commit_harms_nobody(bit: int) -> None:
    """The next commit will be built on it: on bytes that are not in the bucket, the log would be broken for ever."""
    bucket = log_of("skip", "skip")
    whole = read(read_log(RUN), bucket)
    once = read(read_log(RUN), bucket, lambda n, key, data: flipped(data, bit % (8 * len(data))) if n == 2 else data)
    assert once == whole


def test_what_is_damaged_for_good_is_an_error_that_says_so() -> None:
    bucket = log_of()
    with pytest.raises(SignatureError, match="this commit is damaged: its checksum does not fit") as caught:
        read(next_commit(RUN, RunState()), bucket, lambda n, key, data: flipped(data, 100))
    assert "commit/000000000000.json" in str(caught.value) and "the log cannot go on behind it" in str(caught.value)
    hint = caught.value.hint or ""
    assert "bucket's owner" in hint and "earlier version" in hint and "delete this one object" in hint


@pytest.mark.parametrize("harm", ["damage", "deletion"])
def test_who_holds_a_commit_can_look_back_whatever_the_bucket_made_of_it(harm: str) -> None:
    """As the syncer that rolls back must, a moment before it puts the record back."""
    bucket, key = log_of("skip", "skip"), commit_key(0)
    then, whole = read(state_after(RUN, 1, ()), bucket), bucket.get(key) or b""
    bucket.delete(key)
    if harm == "damage":
        bucket.create(key, flipped(whole, 100))
    with pytest.raises((SignatureError, NotFoundError)):
        read(state_after(replace(RUN, kept={}), 1, ()), bucket)
    assert read(state_after(replace(RUN, kept={key: whole}), 1, ()), bucket) == then


def test_foreign_bytes_in_the_place_of_a_commit_or_of_the_format_name_the_object_and_who_mends_it() -> None:
    """Also in a run without checksums, where the bytes themselves show it."""
    plain, bucket = replace(RUN, checksums=False, keyring=UNSIGNED), log_of()
    with pytest.raises(RecordError, match="commit/000000000000") as caught:
        read(next_commit(plain, RunState()), bucket, lambda n, key, data: b"{junk")
    assert "bucket's owner" in (caught.value.hint or "")
    foreign = MemoryStore()
    foreign.create(FORMAT_KEY, b"junk")
    with pytest.raises(RecordError, match="FORMAT") as caught:
        read(read_format("file:///b"), foreign)
    assert "the owner of the bucket puts back its first version" in (caught.value.hint or "")


def test_a_damaged_snapshot_is_none() -> None:
    """It is still JSON, and would be believed: only its commit's digest, and not its own content, is in the log."""
    bucket = log_of("skip")
    state = read(read_log(RUN), bucket)
    read(write_snapshot(RUN, state), bucket)

    def damages(n: int, key: str, data: bytes) -> bytes:
        return data.replace(b'"skips":1', b'"skips":5') if key.startswith("snapshot/") else data

    assert read(snapshot_at(RUN, state.n), bucket) == state
    assert read(snapshot_at(RUN, state.n), bucket, damages) is None
    plain = replace(RUN, keyring=UNSIGNED)
    believed = read(snapshot_at(plain, state.n), bucket, damages)
    assert believed is not None and believed.metrics.skips == 5, "what the checksum is there for"


def test_a_request_that_came_damaged_is_read_again() -> None:
    bucket, state = log_of(), genesis()
    read(ask(state, "stop", "nonce", "then", "please", keyring=RUN.keyring), bucket)
    damages: Damages = lambda n, key, data: data.replace(b"please", b"pleasf") if n == 0 else data  # noqa: E731
    pending = read(pending_requests(RUN, state), bucket, damages)
    assert pending is not None and pending.stop == "please"


def test_the_format_says_whether_records_have_checksums() -> None:
    data = SIGN(LOG, FORMAT_KEY, encode(RUN))
    assert isinstance(parse_format(data, "file:///run").keyring, Checksummed)
    with pytest.raises(RecordError, match="the run's format is damaged"):
        parse_format(data.replace(b'"software":"test"', b'"software":"tesu"'), "file:///run")


def test_no_flipped_bit_switches_them_off() -> None:
    """Readers pass over what they do not know: a format that has lost the word would be believed, and nothing after."""
    data = SIGN(LOG, FORMAT_KEY, encode(RUN))
    formats = [flipped(data, bit) for bit in range(8 * len(data))]
    assert [changed for changed in formats if is_whole(changed, "file:///run")] == []


def test_a_format_that_came_damaged_is_read_again() -> None:
    bucket = MemoryStore()
    bucket.create(FORMAT_KEY, SIGN(LOG, FORMAT_KEY, encode(RUN)))
    run = read(read_format("file:///run"), bucket, lambda n, key, data: flipped(data, 300) if n == 0 else data)
    assert run == RUN and isinstance(run.keyring, Checksummed)
    with pytest.raises(RecordError):
        read(read_format("file:///run"), bucket, lambda n, key, data: flipped(data, 300))


class Passing(SystemClock):
    """Sleeps cost nothing, and are counted."""

    def __init__(self) -> None:
        self.slept_s = 0.0
        super().__init__(lambda: self.slept_s, self._pass, lambda: None)

    def _pass(self, seconds: float) -> None:
        self.slept_s += seconds


@pytest.mark.parametrize("page", [b"<html>sign in</html>", b"", b"{}"])
def test_a_daemon_reads_a_format_for_a_minute_before_it_calls_it_damaged(page: bytes) -> None:
    bucket, clock = MemoryStore(), Passing()
    bucket.create(FORMAT_KEY, SIGN(LOG, FORMAT_KEY, encode(RUN)))
    wrong = DamagingStore(bucket, lambda n, key, data: page if clock.now_s() < 50.0 else data)
    assert perform(read_format("file:///run", None, ("learner/l0",)), wrong, clock) == RUN
    lasting = DamagingStore(bucket, lambda n, key, data: page)
    clock.slept_s = 0.0
    with pytest.raises(RecordError):
        perform(read_format("file:///run", None, ("learner/l0",)), lasting, clock)
    assert clock.slept_s >= 60.0
    clock.slept_s = 0.0
    with pytest.raises(RecordError):
        perform(read_format("file:///run"), lasting, clock)
    assert clock.slept_s == 0.0, "a command answers at once"


def test_a_daemon_reads_a_log_for_a_minute_before_it_calls_it_damaged() -> None:
    bucket, clock = log_of("skip"), Passing()
    wrong = DamagingStore(bucket, lambda n, key, data: b"<html>" if clock.now_s() < 50.0 else data)
    assert perform(patiently(lambda: read_log(RUN)), wrong, clock).n == 1
    with pytest.raises(SignatureError):
        perform(patiently(lambda: read_log(RUN)), DamagingStore(bucket, lambda n, key, data: b"<html>"), clock)


def test_a_damaged_answer_is_nobody_elses_record() -> None:
    """The store says that the key is taken, by what it reads there: one's own words, with one bit flipped."""
    record = offer(genesis())
    key = offer_key(*record.id)
    bucket, store = MemoryStore(), MemoryStore()
    mine = SIGN("learner/l0", key, encode(record))
    store.create(key, mine)
    bucket.create = lambda key, data: Exists(flipped(mine, 100))  # type: ignore[method-assign]
    bucket.get = store.get  # type: ignore[method-assign]
    assert read(create_signed(RUN.keyring, "learner/l0", key, mine), bucket) == mine


def test_who_writes_no_checksums_takes_no_part() -> None:
    """A version that knows of none reads up to schema 2, and says how to upgrade."""
    fresh = replace(RUN, schema=FORMAT_SCHEMA)
    with pytest.raises(RecordError, match=f"written with schema {FORMAT_SCHEMA}; this version reads up to 2"):
        decode(RunFormat, SIGN(LOG, FORMAT_KEY, encode(fresh)), FORMAT_KEY, 2)


def test_a_run_that_was_created_without_goes_on_without() -> None:
    old: RunFormat = parse_format(encode(make_run()), "file:///run")
    assert not old.checksums and old.keyring is UNSIGNED
    record = commit(RunState(), "epoch_start", outputs=genesis().outputs)
    assert fold(old, RunState(), encode(record)).n == 0
    assert decode(Commit, encode(record), "commit") == record
