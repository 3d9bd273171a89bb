"""Snapshots: the folded log after every SNAPSHOT_EVERY commits, so that a log of any age opens fast. They are checked
against the log, and never needed: an older one, or the log from its first commit, gives the same state.

A state grows with the learners and the fragments. Where it is too long for one record its bytes are written in pieces,
before a record that lists their digests."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.digests import digest, is_digest
from diloco_cli.protocol.log.keys import (
    HEAD_HINT_KEY,
    commit_key,
    read_snapshot_key,
    snapshot_key,
    snapshot_piece_key,
)
from diloco_cli.protocol.log.operations import Create, Get, List, Put, Steps, together, together_got
from diloco_cli.protocol.log.records import MAX_EXACT, SCHEMA, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import MAX_BODY_BYTES, MAX_RECORD_BYTES, RecordError, decode, encode, record_digest
from diloco_cli.signing import LOG, unpacked

SNAPSHOT_EVERY = 64
PIECE_BYTES = MAX_BODY_BYTES  # the longest snapshot in one record, and each piece of a longer one but the last
MAX_PIECES = 64
TRIES = 3  # of the newest snapshots; after that the log is read from commit 0


@dataclass(frozen=True)
class Snapshot:
    """The folded log up to commit n. Checked against commit n's digest, so it is never trusted blindly."""

    state: RunState
    commit_digest: str
    run_id: str
    schema: int = SCHEMA


@dataclass(frozen=True)
class PiecedSnapshot:
    """In the place of a snapshot that is too long: the digests of its pieces, in order."""

    pieces: tuple[str, ...]


@dataclass(frozen=True)
class HeadHint:
    """Where to start reading: the newest snapshot. A lost or stale hint costs time, never correctness."""

    snapshot: int


_PIECED = b'{"pieces":'  # how its record begins


def newest_snapshot(run: RunFormat, beyond: int, before: int = MAX_EXACT) -> Steps[RunState | None]:
    """The newest valid snapshot of a commit > `beyond` and < `before`; None if there is none."""
    numbers = yield from snapshots_between(beyond + 1, before - 1)
    for number in numbers[::-1][:TRIES]:
        state = yield from snapshot_at(run, number)
        if state is not None:
            return state
    return None


def snapshots_between(first: int, last: int) -> Steps[tuple[int, ...]]:
    """Numbers of snapshots in [first, last], rising. From a listing, which may lag and may name invalid snapshots."""
    found: list[int] = []
    after = snapshot_key(first - 1) if first > 0 else ""
    while True:
        keys: list[str] = yield List("snapshot/", after)
        numbers = [number for number in map(read_snapshot_key, keys) if number is not None]
        found += [number for number in numbers if number <= last]
        if not keys or (numbers and numbers[-1] > last):
            return tuple(found)
        after = keys[-1]


def hinted_snapshot(run: RunFormat) -> Steps[RunState]:
    hint_data = yield Get(HEAD_HINT_KEY, MAX_RECORD_BYTES)
    try:
        if hint_data is None:
            return RunState()
        n = decode(HeadHint, hint_data, HEAD_HINT_KEY).snapshot
    except RecordError:
        return RunState()
    return (yield from snapshot_at(run, n)) or RunState()


def snapshot_at(run: RunFormat, n: int) -> Steps[RunState | None]:
    """The state after commit n from its snapshot; None if it is missing or invalid: an older start is slower, never
    wrong. A snapshot of another schema was folded by other rules, and is invalid; so is one that another key signed
    than commit n itself: a syncer writes snapshots of its own commits."""
    if not 0 <= n < MAX_EXACT:
        return None
    data, commit = yield from together_got([snapshot_key(n), commit_key(n)], MAX_RECORD_BYTES)
    if data is None or commit is None:
        return None
    signed = run.keyring.signature(LOG, snapshot_key(n), data)
    if signed is None or signed != run.keyring.signature(LOG, commit_key(n), commit):
        return None
    try:
        snapshot = yield from read_snapshot(n, data)
    except RecordError:
        return None
    same = snapshot.run_id == run.run_id and snapshot.state.n == n and snapshot.schema == SCHEMA
    same = same and signed.public in ("", snapshot.state.epoch_key)
    return snapshot.state if same and snapshot.commit_digest == record_digest(commit) else None


def read_snapshot(n: int, data: bytes) -> Steps[Snapshot]:
    """The snapshot whose record is `data`, of which pieces are read if it lies in pieces. Raises RecordError."""
    pieces = yield from read_pieces(n, data)
    if not pieces:
        return decode(Snapshot, data, snapshot_key(n))
    return decode(Snapshot, b"".join(pieces.values()), snapshot_key(n), max_bytes=PIECE_BYTES * MAX_PIECES)


def read_pieces(n: int, data: bytes) -> Steps[dict[str, bytes]]:
    """The pieces that this record of a snapshot names, by their keys, in order; none if it is whole. Raises
    RecordError."""
    if not unpacked(data).startswith(_PIECED):
        return {}
    digests = decode(PiecedSnapshot, data, snapshot_key(n)).pieces
    if not 0 < len(digests) <= MAX_PIECES or not all(map(is_digest, digests)):
        raise RecordError(f"not digests of 1 to {MAX_PIECES} pieces", where=snapshot_key(n))
    keys = [snapshot_piece_key(n, *one) for one in enumerate(digests)]
    found: dict[str, bytes] = {}
    for key, piece, named in zip(keys, (yield from together_got(keys, PIECE_BYTES)), digests, strict=True):
        if piece is None or digest(piece) != named:
            raise RecordError("a piece of a snapshot is missing or damaged", where=key)
        found[key] = piece
    return found


def write_snapshot(run: RunFormat, state: RunState) -> Steps[None]:
    """Write the snapshot of a state, and the hint to it. A state too long for MAX_PIECES gets no snapshot: readers then
    start from an older one."""
    key = snapshot_key(state.n)
    try:
        data = encode(Snapshot(state, state.digest, run.run_id), max_bytes=PIECE_BYTES * MAX_PIECES)
    except RecordError:
        return
    if len(data) > PIECE_BYTES:
        pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
        digests = tuple(map(digest, pieces))
        keys = [snapshot_piece_key(state.n, *piece) for piece in enumerate(digests)]
        yield from together([_created(*one) for one in zip(keys, pieces, strict=True)])
        data = encode(PiecedSnapshot(digests))
    yield Create(key, run.keyring.sign(LOG, key, data))
    yield Put(HEAD_HINT_KEY, encode(HeadHint(state.n)))


def _created(key: str, data: bytes) -> Steps[None]:
    yield Create(key, data)
