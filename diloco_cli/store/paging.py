"""Listings page by page, where each page alone would cost a look at everything.

A walk over the keys in order is kept for the call that asks for what follows it, so that a listing of n keys in pages
costs hardly more than one without. What is created meanwhile may be missing between the pages of one walk (a listing
may lag), never behind its end, and never in a walk that begins anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice

from diloco_cli import clock

MAX_WALKS = 4
KEPT_S = 60.0

Walk = Callable[[str, str], Iterator[str]]
"""(prefix, after) -> keys in order."""


class Paging:
    """The pages of one store's listings. Safe between threads."""

    def __init__(self, walk: Walk, monotonic: Callable[[], float] = clock.monotonic_s) -> None:
        self._walk, self._monotonic = walk, monotonic
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], tuple[float, Iterator[str]]] = {}

    def page(self, prefix: str, after: str, limit: int) -> list[str]:
        """At most `limit` keys beyond `after`."""
        began_s, walk = self._taken(prefix, after)
        found = list(islice(walk, limit))
        if len(found) < limit and began_s is not None:  # it may end before what is new
            began_s, walk = None, self._walk(prefix, found[-1] if found else after)
            found += islice(walk, limit - len(found))
        if found and len(found) == limit:
            self._keep((prefix, found[-1]), self._monotonic() if began_s is None else began_s, walk)
        return found

    def _taken(self, prefix: str, after: str) -> tuple[float | None, Iterator[str]]:
        """The walk that came to `after`, and since when it goes on; or a new one."""
        with self._lock:
            kept = self._kept.pop((prefix, after), None)
        if kept is None or self._monotonic() - kept[0] > KEPT_S:
            return None, self._walk(prefix, after)
        return kept

    def _keep(self, came_to: tuple[str, str], began_s: float, walk: Iterator[str]) -> None:
        with self._lock:
            self._kept[came_to] = (began_s, walk)
            while len(self._kept) > MAX_WALKS:
                del self._kept[next(iter(self._kept))]
