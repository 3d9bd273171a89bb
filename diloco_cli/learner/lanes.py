"""Threads beside the training: each lane performs protocol steps one after the other, in the order they were handed in.

What ends a lane ends the learner: the training's clock raises it before its next operation.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from diloco_cli.protocol.actors.learner import Lane
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.runtime.driver import Clock, perform
from diloco_cli.store.port import Store


class Lanes:
    """Of one learner's process; daemon threads, so that none outlives it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._queues: dict[Lane, queue.Queue[Steps[Any] | None]] = {}
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        self.news = threading.Event()

    def start(self, lane: Lane, steps: Steps[Any]) -> None:
        if lane not in self._queues:
            self._queues[lane] = queue.Queue()
            thread = threading.Thread(target=self._work, args=(self._queues[lane],), name=lane, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[lane].put(steps)

    def _work(self, jobs: queue.Queue[Steps[Any] | None]) -> None:
        try:
            while (steps := jobs.get()) is not None:
                perform(steps, self._store, self._clock)
        except BaseException as error:  # handed to the training thread, which raises it
            self.failure = error
            self.news.set()

    def check(self) -> None:
        """Raises what ended a lane."""
        if self.failure is not None:
            raise self.failure

    def sleep_s(self, seconds: float) -> None:
        """The training's way to wait: news wakes it."""
        self.news.wait(seconds)
        self.news.clear()

    def close(self, timeout_s: float) -> None:
        """Let each lane finish what it has, within `timeout_s`."""
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
