"""A store whose calls all end by one deadline, also if the store below hangs: for commands that a person waits for.

A client's own timeouts are made for transfers that may take minutes, and a hung network file system has none. So each
call is made in a thread of its own, which is abandoned at the deadline: the call may still take effect later.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from diloco_cli import clock
from diloco_cli.store.port import Store, StoreUnavailableError
from diloco_cli.store.wrapper import StoreWrapper
from diloco_cli.units import format_duration

T = TypeVar("T")


class Deadline:
    """How much time is left; shared by all calls that must end together."""

    def __init__(self, seconds: float, monotonic: Callable[[], float] = clock.monotonic_s) -> None:
        self._monotonic = monotonic
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """From now on `seconds` are left."""
        self.seconds = max(0.0, seconds)
        self._end_s = self._monotonic() + self.seconds

    def end(self) -> None:
        """There is no time left."""
        self._end_s = self._monotonic()

    def left_s(self) -> float:
        return max(0.0, self._end_s - self._monotonic())

    def is_over(self) -> bool:
        return self.left_s() <= 0


class TimeBoxedStore(StoreWrapper):
    """Raises StoreUnavailableError at the deadline, also during a call. Waiting can be interrupted (Ctrl-C). Not for
    the background: an abandoned call holds a thread and its memory until the store answers.

    While an abandoned call hangs, no other call begins and the error is raised at once, also after a restart of the
    deadline, so that repeated looks at a hung file system do not accumulate threads. With `keeps_trying` calls begin
    all the same, for the last few writes of a command."""

    def __init__(self, store: Store, box: Deadline, keeps_trying: bool = False) -> None:
        super().__init__(store)
        self._box = box
        self._keeps_trying = keeps_trying
        self._left_behind: set[threading.Thread] = set()

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        self._left_behind -= {thread for thread in self._left_behind.copy() if not thread.is_alive()}
        if self._left_behind and not self._keeps_trying:
            self._box.end()
        where, hint = f"{self.url}/{key}".rstrip("/"), f"diloco doctor {self.url}"
        return call_within(self._box, call, where, hint, self._left_behind.add)


def call_within(
    box: Deadline,
    call: Callable[[], T],
    where: str,
    hint: str = "",
    on_leaving: Callable[[threading.Thread], object] = lambda thread: None,
) -> T:
    """The call's result; StoreUnavailableError if the deadline comes first, and then the call is abandoned."""
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    no_answer = StoreUnavailableError(
        f"the store gave no answer within {format_duration(box.seconds)}", where=where, hint=hint or None
    )
    left_s = box.left_s()
    if left_s <= 0:
        raise no_answer
    thread = threading.Thread(target=_answer, args=(call, outcome), name="store-call", daemon=True)
    thread.start()
    try:
        result, error = outcome.get(timeout=left_s)
    except queue.Empty:
        on_leaving(thread)
        raise no_answer from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _answer(call: Callable[[], T], outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]]) -> None:
    try:
        outcome.put((call(), None))
    except BaseException as error:  # handed to the caller, which raises it
        outcome.put((None, error))
