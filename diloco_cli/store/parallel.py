"""Many reads of a store at a time: a cloud's bucket takes tens of milliseconds for each, and as many again at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from diloco_cli.config.settings import MAX_CONNECTIONS
from diloco_cli.environment import environment_value
from diloco_cli.errors import UsageError

CONNECTIONS_VARIABLE = "DILOCO_STORE_CONNECTIONS"


def connections_here() -> int:
    """How many calls this machine's processes make at a time. Raises UsageError."""
    setting = environment_value(CONNECTIONS_VARIABLE) or str(MAX_CONNECTIONS)
    if not setting.isdecimal() or not 1 <= int(setting) <= MAX_CONNECTIONS:
        raise UsageError(
            f"not a number of connections: {setting!a}", where=CONNECTIONS_VARIABLE, hint=f"1 to {MAX_CONNECTIONS}"
        )
    return int(setting)


Item = TypeVar("Item")
Answer = TypeVar("Answer")


def answers(call: Callable[[Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
    """The calls' answers in the order of the items. The first error ends those that have not begun."""
    with ThreadPoolExecutor(connections_here()) as pool:
        yield from pool.map(call, items)
