"""Opens the store at a URL, and what a process does around its stores: how many calls it makes at a time, and the
removal of what killed writers left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from diloco_cli.environment import environment_value
from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.store.local import check_directory
from diloco_cli.store.port import MAX_CONNECTIONS, Discarded, Store
from diloco_cli.store.url import parse_url
from diloco_cli.store.wrappers import DisturbedStore

FAULT_VARIABLE = "DILOCO_STORE_FAULT_FILE"  # of a unit that a supervisor has started
CONNECTIONS_VARIABLE = "DILOCO_STORE_CONNECTIONS"
DISCARD_EVERY_S = 600.0

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def open_store(url: str, *, create: bool = False) -> Store:
    """The store at this URL. `create` makes a missing directory and demands that it is writable; buckets are never
    made. Cloud clients are imported and started at their first call, in the process that makes it."""
    parsed = parse_url(url)
    if parsed.scheme == "file":
        check_directory(Path(parsed.place), create)
    store: Store = _named(parsed.kind.opener)(parsed.place, parsed.prefix)
    return disturbable(store)


def disturbable(store: Store) -> Store:
    """In a unit's process: faults on purpose may disturb its calls (`diloco chaos run`)."""
    path = environment_value(FAULT_VARIABLE)
    return DisturbedStore(store, Path(path)) if path else store


def check_credentials(url: str) -> None:
    """Raises StoreForbiddenError where those that this machine's environment names for the store cannot be read."""
    if named := parse_url(url).kind.credentials:
        _named(named)()


def _named(name: str) -> Callable[..., Any]:
    """What `module:callable` in a store's record stands for."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found


def connections_here() -> int:
    """How many calls this machine's processes make at a time. Raises UsageError."""
    setting = environment_value(CONNECTIONS_VARIABLE) or str(MAX_CONNECTIONS)
    if not setting.isdecimal() or not 1 <= int(setting) <= MAX_CONNECTIONS:
        raise UsageError(
            f"not a number of connections: {setting!a}", where=CONNECTIONS_VARIABLE, hint=f"1 to {MAX_CONNECTIONS}"
        )
    return int(setting)


def answers(call: Callable[[Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
    """The calls' answers in the order of the items, made many at a time, because each takes a cloud's bucket tens of
    milliseconds. The first error ends those that have not begun."""
    with ThreadPoolExecutor(connections_here()) as pool:
        yield from pool.map(call, items)


def discard_leftovers_at(url: str) -> Discarded:
    """Discard what killed writers left at this URL, which only takes space, if its store can have such."""
    parsed = parse_url(url)
    found: Discarded = _named(parsed.kind.leftovers)(parsed) if parsed.kind.leftovers else Discarded()
    return found


@contextmanager
def discarding_leftovers(urls: Sequence[str]) -> Iterator[None]:
    """While the context lasts, a thread discards leftovers at these places from time to time."""
    leaving = threading.Event()

    def discard() -> None:
        while not leaving.wait(DISCARD_EVERY_S):
            for url in urls:
                with suppress(DilocoError):  # the process that works there reports the error
                    discard_leftovers_at(url)

    threading.Thread(target=discard, name="leftovers", daemon=True).start()
    try:
        yield
    finally:
        leaving.set()
