"""Threads of one simulated process: each lane performs steps one after the other, in the order they were handed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from diloco_cli.protocol.actors.learner import Lane
from diloco_cli.protocol.log.operations import Steps


class VirtualLanes:
    """`begin` starts an actor of the process. A lane's actor ends with its last steps; the next ones get a new one."""

    def __init__(self, begin: Callable[[Steps[Any]], object]) -> None:
        self._begin = begin
        self._waiting: dict[Lane, deque[Steps[Any]]] = {}

    def start(self, lane: Lane, steps: Steps[Any]) -> None:
        if lane in self._waiting:
            self._waiting[lane].append(steps)
            return
        self._waiting[lane] = deque([steps])
        self._begin(self._work(lane))

    def _work(self, lane: Lane) -> Steps[bool]:
        waiting = self._waiting[lane]
        while waiting:
            yield from waiting.popleft()
        del self._waiting[lane]
        return True
