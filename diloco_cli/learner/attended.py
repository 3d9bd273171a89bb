"""A store whose calls may take long, for a thread that others wait for: it shows that it lives while a call lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from diloco_cli.clock import monotonic_s
from diloco_cli.store.port import Store
from diloco_cli.store.wrappers import StoreWrapper

T = TypeVar("T")
ATTEND_S, MOST_S = 2.0, 3600.0


class AttendedStore(StoreWrapper):
    """Each call is made in a thread of its own, and the calling thread calls `attend` every few seconds meanwhile: the
    saved moments of a large model take minutes, and an island's other ranks take silence for a hang. After `most_s` it
    is silent, because a call may hang itself (a network file system): then a watchdog may end the process. Only the
    thread that made this object attends: an island's ranks are told by one thread alone."""

    def __init__(
        self, store: Store, attend: Callable[[], object], every_s: float = ATTEND_S, most_s: float = MOST_S
    ) -> None:
        super().__init__(store)
        self._attend, self._every_s, self._most_s = attend, every_s, most_s
        self._owner = threading.get_ident()

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        if threading.get_ident() != self._owner:  # one of several calls: the owner waits for them, and attends itself
            return call()
        found: list[T] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                found.append(call())
            except BaseException as error:  # the calling thread raises it
                failed.append(error)

        thread = threading.Thread(target=work, name=f"store {verb}", daemon=True)
        thread.start()
        until_s = monotonic_s() + self._most_s
        while thread.is_alive():
            thread.join(self._every_s)
            if thread.is_alive() and monotonic_s() < until_s:
                self._attend()
        if failed:
            raise failed[0]
        return found[0]
