"""Many reads of a store at a time: a cloud's bucket takes tens of milliseconds for each, and as many again at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

READERS = 48  # below the connections that the clients keep
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def answers(call: Callable[[Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
    """The calls' answers in the order of the items. The first error ends those that have not begun."""
    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(call, items)
