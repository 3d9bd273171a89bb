"""Reads a log's commits ahead of their reader, where a read takes its time, as in a cloud's bucket."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from diloco_cli.clock import monotonic_s
from diloco_cli.protocol.log.keys import commit_key, read_commit_key
from diloco_cli.protocol.log.records import MAX_EXACT
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES
from diloco_cli.store.parallel import connections_here
from diloco_cli.store.port import Store
from diloco_cli.store.wrapper import StoreWrapper

QUICK_S, SLOW_S = 0.002, 0.064


class CommitsAhead(StoreWrapper):
    """For one reader, which asks for one commit after the other; other reads pass. So many as it has read are read
    ahead, at most as many as there are connections, and none after `last`: a short way past the log's end costs little.
    In a directory the reads stay its own: threads would cost more than they save."""

    def __init__(self, store: Store, last: int = MAX_EXACT) -> None:
        super().__init__(store)
        self._last, self._next, self._in_a_row, self._own_s = last, -1, 0, 0.0
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[int, Future[bytes | None]] = {}

    def __enter__(self) -> CommitsAhead:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        n = read_commit_key(key)
        if n is None or max_bytes != MAX_RECORD_BYTES:
            return super().get(key, max_bytes)
        self._in_a_row = self._in_a_row + 1 if n == self._next else 0
        self._next = n + 1
        begun = self._begun.pop(n, None)
        self._begin()
        if begun is not None:
            return begun.result()
        began_s = monotonic_s()
        data = super().get(key, max_bytes)
        self._own_s += monotonic_s() - began_s - QUICK_S
        return data

    def _begin(self) -> None:
        if self._own_s < SLOW_S:
            return
        most = connections_here()
        self._pool = self._pool or ThreadPoolExecutor(most)
        wanted = range(self._next, min(self._next + min(self._in_a_row, most), self._last + 1))
        self._begun = {n: future for n, future in self._begun.items() if n in wanted}
        for n in wanted:
            if n not in self._begun:
                self._begun[n] = self._pool.submit(self._store.get, commit_key(n), MAX_RECORD_BYTES)
