"""Performs steps by hand: each operation, also of a set, gets its answer from a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_cli.protocol.log.operations import Operation, Steps, Together


def played(steps: Steps[Any], answer: Callable[[Operation], Any]) -> Any:
    """The steps' result."""
    sent: Any = None
    while True:
        try:
            operation = steps.send(sent)
        except StopIteration as stop:
            return stop.value
        together = isinstance(operation, Together)
        sent = [answer(one) for one in operation.operations] if together else answer(operation)
