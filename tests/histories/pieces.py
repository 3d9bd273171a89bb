"""Checks of snapshots that lie in pieces: their record comes after all of them, and only whole ones count."""

from __future__ import annotations

from collections import Counter

from diloco_cli.protocol.log.keys import read_snapshot_key, read_snapshot_piece_key, snapshot_piece_key
from diloco_cli.protocol.log.snapshots import PiecedSnapshot
from diloco_cli.protocol.log.wire import RecordError, decode
from tests.histories.client import Bucket
from tests.histories.replayer import expect


def check_record(bucket: Bucket, key: str, data: bytes, floor: int) -> None:
    """A snapshot's record has just been created. Behind the floor its writer was held up; its pieces may be gone."""
    n = read_snapshot_key(key)
    if n is not None and n > floor:
        missing = _missing(bucket, n, data)
        expect(not missing, "9", f"{key} was created, and there is no {', '.join(missing)}")


def whole_snapshots(bucket: Bucket) -> list[int]:
    """The numbers of this bucket's snapshots, but for forged ones and those that lack a piece."""
    read = ((read_snapshot_key(key), data) for key, data in bucket.objects.items() if key not in bucket.forged)
    return [n for n, data in read if n is not None and not _missing(bucket, n, data)]


def most_pieces(bucket: Bucket) -> int:
    """Of one snapshot that is there; 0: all are whole. What others put there does not count."""
    keys = bucket.objects.keys() - bucket.foreign
    pieces = Counter(n for n in map(read_snapshot_piece_key, keys) if n is not None)
    return max(pieces.values(), default=0)


def _missing(bucket: Bucket, n: int, data: bytes) -> list[str]:
    try:
        digests = decode(PiecedSnapshot, data, "").pieces
    except RecordError:  # a whole one, or damaged
        return []
    return [key for key in (snapshot_piece_key(n, *one) for one in enumerate(digests)) if key not in bucket.objects]
