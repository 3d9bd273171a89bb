"""Listings in pages: what a sequence of them costs, and what it shows of changes meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_cli.store import local
from diloco_cli.store.local import KEPT_S, MAX_WALKS, LocalStore, Paging

KEYS = [f"k{number:03d}" for number in range(100)]


class Counted:
    """Keys in order, and how many walks over them were begun."""

    def __init__(self) -> None:
        self.keys, self.begun, self.now_s = list(KEYS), 0, 0.0
        self.paging = Paging(self._walk, lambda: self.now_s)

    def _walk(self, prefix: str, after: str) -> Iterator[str]:
        self.begun += 1
        yield from [key for key in self.keys if key.startswith(prefix) and key > after]

    def all(self, limit: int, pause_s: float = 0.0) -> list[str]:
        found: list[str] = []
        while page := self.paging.page("k", found[-1] if found else "", limit):
            found += page
            self.now_s += pause_s
        return found


def test_a_sequence_of_pages_is_one_walk_and_one_look_for_what_is_new() -> None:
    counted = Counted()
    assert counted.all(limit=7) == KEYS
    assert counted.begun <= 3
    assert counted.all(limit=7) == KEYS


def test_a_walk_that_rests_too_long_begins_anew() -> None:
    counted = Counted()
    assert counted.all(limit=50, pause_s=2 * KEPT_S) == KEYS
    assert counted.begun == 3


def test_a_page_shows_what_was_created_behind_the_end_of_the_one_before() -> None:
    counted = Counted()
    assert counted.paging.page("k", "", 100) == KEYS
    counted.keys.append("k100")
    assert counted.paging.page("k", "k099", 100) == ["k100"]


def test_a_new_sequence_shows_everything_that_is_there() -> None:
    counted = Counted()
    counted.paging.page("k", "", 10)
    counted.keys.insert(0, "k")
    assert counted.paging.page("k", "", 2) == ["k", "k000"]


def test_several_sequences_go_on_beside_each_other_and_few_are_remembered() -> None:
    counted = Counted()
    for number in range(MAX_WALKS + 1):
        assert counted.paging.page("k", f"k0{number}0", 1) == [f"k0{number}1"]
    assert counted.begun == MAX_WALKS + 1
    assert counted.paging.page("k", f"k0{MAX_WALKS}1", 1) == [f"k0{MAX_WALKS}2"]
    assert counted.begun == MAX_WALKS + 1
    assert counted.paging.page("k", "k001", 1) == ["k002"]
    assert counted.begun == MAX_WALKS + 2


def test_nothing_is_listed_where_nothing_is_wanted() -> None:
    assert Counted().paging.page("k", "", 0) == []


def test_a_directory_is_read_once_for_all_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    original = local._listed

    def counted(entries: Iterator[os.DirEntry[str]]) -> Iterator[str]:
        nonlocal read
        for name in original(entries):
            read += 1
            yield name

    monkeypatch.setattr(local, "_listed", counted)
    store, num = LocalStore(tmp_path), 400
    (tmp_path / "delta").mkdir()
    for number in range(num):
        (tmp_path / "delta" / f"{number:05d}").touch()
    found: list[str] = []
    while page := store.list("delta/", found[-1] if found else "", 10):
        found += page
        store.delete(page[0])
    assert found == [f"delta/{number:05d}" for number in range(num)]
    assert read <= 3 * num


def test_a_large_directory_is_listed_in_pieces_that_miss_and_repeat_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_NAMES_AT_ONCE", 3)
    store = LocalStore(tmp_path)
    keys = sorted(["a", "a-b", "a0", "b/1", "b/2", "b/3", "b/4", "b/5", "b-c", "c", "d/e/f", "d/e/g", "e", "f"])
    for key in keys:
        store.create(f"x/{key}", b"")
    assert store.list("x/") == sorted(f"x/{key}" for key in keys)
    assert store.list("x/b", "x/b/2") == ["x/b/3", "x/b/4", "x/b/5"]
