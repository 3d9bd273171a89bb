"""The log of a simulated bucket as plain data."""

from __future__ import annotations

from typing import Any

from diloco_cli.store.port import Store
from tests.histories.replayer import in_one


def commits_of(store: Store) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while (data := store.get(f"commit/{len(found):012d}.json")) is not None:
        found.append(in_one(data))
    assert len(store.list("commit/", limit=100_000)) == len(found), "a commit beyond a gap"
    return found
