"""Exclusive create under races: of all racers that create a key at one time, exactly one wins, and all agree on it.

Racing processes are started once and told each round's start by a line on their standard input:

parent -> racer   {"key", "entry" (hex), "at_s"}     create it at that moment of the machine's monotonic clock
racer -> parent   {"ready": true}                    once, when its client is warm
                  {"won", "holder" (hex), "trouble"} after each round
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diloco_cli import clock
from diloco_cli.doctor.checks import Finding, Place, demand, noise, passed
from diloco_cli.errors import DilocoError
from diloco_cli.runtime.units import Child, end_all
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Created, Store, StoreUnavailableError
from diloco_cli.store.retry import RetryingStore

RACE_BYTES = 2000
GET_READY_S = 10.0
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


def fault_of_round(entries: Sequence[bytes], answers: Sequence[RaceAnswer], final: bytes | None) -> str:
    """The error of one round, empty if there is none. `entries`: each racer's bytes; `final`: the key's bytes when all
    racers have their answers."""
    told = [(entry, answer) for entry, answer in zip(entries, answers, strict=True) if not answer.trouble]
    winners = [entry for entry, answer in told if answer.won]
    if len(winners) > 1:
        return f"{len(winners)} of {len(entries)} racers were told that they had created the same object"
    if final is None:
        return "the object that was created is not there"
    if final not in entries:
        return "the object holds bytes that no racer wrote"
    if winners and winners[0] != final:
        return "the object holds a loser's bytes"
    if not winners and len(told) == len(entries):
        return "no racer was told that it had created the object"
    if any(answer.holder != final for _, answer in told if not answer.won):
        return "a loser was shown other bytes than the winner's"
    return ""


def exclusive_create(place: Place, racers: int, rounds: int, processes: int) -> Finding:
    """Races of threads with a client each, then of processes, where the store can be reached by others."""
    held = [race_of_threads(place, racers, rounds)]
    if processes:
        held.append(race_of_processes(place, processes, rounds))
    problems = [text for text, wrong in held if wrong]
    detail = "; ".join(problems or [text for text, _ in held])
    demand(not problems, detail)
    return passed(detail)


def race_of_threads(place: Place, racers: int, rounds: int) -> tuple[str, bool]:
    """(what happened, whether it was wrong)."""
    clients = [place.client(number) for number in range(racers)]
    return _rounds(place, "threads", rounds, racers, lambda key, entries: _race(clients, key, entries))


def race_of_processes(place: Place, racers: int, rounds: int) -> tuple[str, bool]:
    """(what happened, whether it was wrong)."""
    left_s = place.box.left_s
    with racing_processes(place.prefix_url, racers, left_s) as children:
        return _rounds(place, "processes", rounds, racers, lambda key, entries: race(children, key, entries, left_s()))


def _rounds(
    place: Place, who: str, rounds: int, racers: int, run: Callable[[str, Sequence[bytes]], list[RaceAnswer]]
) -> tuple[str, bool]:
    wrong = []
    for number in range(rounds):
        key = f"race/{who}-{number:04d}"
        place.remember(key)
        entries = [f"racer {me} of {key} ".encode() + noise(f"{key} {me}", RACE_BYTES) for me in range(racers)]
        answers = run(key, entries)
        fault = fault_of_round(entries, answers, place.store.get(key))
        wrong += [fault] if fault else []
        if all(answer.trouble for answer in answers):  # no racer got an answer, so the round proves nothing
            raise StoreUnavailableError(answers[0].trouble)
    if wrong:
        return f"{racers} {who}: {len(wrong)} of {rounds} rounds went wrong: {wrong[0]}", True
    return f"{racers} {who}, {rounds} rounds: one winner each", False


def _race(clients: Sequence[Store], key: str, entries: Sequence[bytes]) -> list[RaceAnswer]:
    """Let all clients create the key at once."""
    gun = threading.Barrier(len(clients))

    def run(client: Store, entry: bytes) -> RaceAnswer:
        gun.wait(GET_READY_S)
        return answer_to(client, key, entry)

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(run, clients, entries))


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
