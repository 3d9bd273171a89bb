"""Listings of the simulated bucket lag behind; nothing else does."""

from __future__ import annotations

from diloco_cli.histories.client import Bucket

KEYS = [f"delta/{name}" for name in "abc"]


class Clock:
    now_s = 0.0


def filled(clock: Clock) -> Bucket:
    bucket = Bucket(lambda: clock.now_s)
    for key in KEYS:
        bucket.create(key, b"")
    return bucket


def test_a_new_key_is_listed_late_and_read_at_once() -> None:
    clock = Clock()
    bucket = filled(clock)
    bucket.listed_from_s[KEYS[1]] = 5.0
    assert bucket.list("delta/") == [KEYS[0], KEYS[2]] and bucket.get(KEYS[1]) == b""
    clock.now_s = 5.0
    assert bucket.list("delta/") == KEYS


def test_a_deleted_key_is_listed_for_a_while_and_never_read() -> None:
    clock = Clock()
    bucket = filled(clock)
    bucket.delete(KEYS[1])
    bucket.listed_until_s[KEYS[1]] = 5.0
    assert bucket.list("delta/") == KEYS and bucket.get(KEYS[1]) is None
    assert bucket.list("delta/", after=KEYS[0]) == KEYS[1:] and bucket.list("weights/") == []
    assert bucket.list("delta/", limit=2) == KEYS[:2], "it counts like any other"
    clock.now_s = 5.0
    assert bucket.list("delta/") == [KEYS[0], KEYS[2]]


def test_a_deleted_key_that_is_written_again_is_listed_once() -> None:
    bucket = filled(Clock())
    bucket.listed_until_s[KEYS[1]] = 5.0
    assert bucket.list("delta/") == KEYS
