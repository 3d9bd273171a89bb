"""Processes that race for one key: started once, told each round's start by a line on their standard input.

parent -> racer   {"key", "entry" (hex), "at_s"}     create it at that moment of the machine's monotonic clock
racer -> parent   {"ready": true}                    once, when its client is warm
                  {"won", "holder" (hex), "trouble"} after each round
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diloco_cli import clock
from diloco_cli.errors import DilocoError
from diloco_cli.runtime.units import Child, end_all
from diloco_cli.store.port import Created, Store, StoreUnavailableError

HEAD_START_S = 0.02
LEAVE_WITHIN_S = 0.5
GIVE_UP_S = 20.0


@dataclass(frozen=True)
class RaceAnswer:
    """One racer's answer: whether it won, and the bytes that the key holds. `trouble`: why it got no answer."""

    won: bool
    holder: bytes = b""
    trouble: str = ""


def answer_to(store: Store, key: str, entry: bytes) -> RaceAnswer:
    """One racer's turn."""
    try:
        outcome = store.create(key, entry)
    except DilocoError as error:
        return RaceAnswer(False, trouble=str(error))
    return RaceAnswer(True, entry) if isinstance(outcome, Created) else RaceAnswer(False, outcome.data)


@contextmanager
def racing_processes(url: str, racers: int, left_s: Callable[[], float]) -> Iterator[list[Child]]:
    """Racers that end with the block. Raises StoreUnavailableError if a racer cannot reach the store in time."""
    children: list[Child] = []
    try:
        for _ in range(racers):
            children.append(Child(__name__, url, apart=True))
        end_s = clock.monotonic_s() + left_s()
        for child in children:
            said = _answer(child, end_s)
            if said.get("trouble"):
                raise StoreUnavailableError(str(said["trouble"]))
        yield children
    finally:
        end_all(children, LEAVE_WITHIN_S)


def race(children: Sequence[Child], key: str, entries: Sequence[bytes], within_s: float) -> list[RaceAnswer]:
    """Let all processes create the key at the same time."""
    end_s = clock.monotonic_s() + within_s
    at_s = clock.monotonic_s() + HEAD_START_S
    for child, entry in zip(children, entries, strict=True):
        child.tell({"key": key, "entry": entry.hex(), "at_s": at_s})
    answers = [_answer(child, end_s) for child in children]
    return [RaceAnswer(bool(a["won"]), bytes.fromhex(a["holder"]), str(a["trouble"])) for a in answers]


def _answer(child: Child, end_s: float) -> dict[str, Any]:
    no_answer = StoreUnavailableError("a racing process gave no answer in time")
    try:
        said: dict[str, Any] | None = child.answer(end_s - clock.monotonic_s())
    except TimeoutError:
        raise no_answer from None
    if said is None:
        raise no_answer
    return said


def _run_racer(url: str) -> None:
    """The racer process: it races until the parent closes the pipe."""
    from diloco_cli.store.open import open_store
    from diloco_cli.store.retry import RetryingStore

    try:
        store = RetryingStore(open_store(url), deadline_s=GIVE_UP_S)
        store.get("race/warm-up")
    except DilocoError as error:
        _say({"trouble": str(error)})
        return
    _say({"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        clock.sleep_s(task["at_s"] - clock.monotonic_s())
        answer = answer_to(store, task["key"], bytes.fromhex(task["entry"]))
        _say({"won": answer.won, "holder": answer.holder.hex(), "trouble": answer.trouble})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    _run_racer(sys.argv[1])
