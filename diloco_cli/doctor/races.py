"""Exclusive create under races: of all who create one key at one moment, exactly one wins, and all agree on whom."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from diloco_cli.doctor.place import Place, noise
from diloco_cli.doctor.racing_processes import RacingProcesses
from diloco_cli.doctor.verdicts import Finding, failed, passed
from diloco_cli.errors import DilocoError
from diloco_cli.store.port import Created, Store, StoreUnavailableError

RACE_BYTES = 2000
GET_READY_S = 10.0


@dataclass(frozen=True)
class Answer:
    """What one racer was told: whether it won, and whose bytes hold the key by now. `trouble`: it was told nothing."""

    won: bool
    holder: bytes = b""
    trouble: str = ""


def fault_of_round(entries: Sequence[bytes], answers: Sequence[Answer], final: bytes | None) -> str:
    """What is wrong with one round, empty if nothing is. `entries`: each racer's bytes; `final`: what the key holds
    when all have had their answers."""
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
    if not problems:
        return passed(detail)
    return failed(detail, "no run is safe here: use a store whose create is exclusive (GCS, S3, a local directory)")


def race_of_threads(place: Place, racers: int, rounds: int) -> tuple[str, bool]:
    """(what happened, whether it was wrong)."""
    clients = [place.client(number) for number in range(racers)]
    wrong = []
    for number in range(rounds):
        key = f"race/threads-{number:04d}"
        place.remember(key)
        entries = _entries(key, racers)
        answers = _race(clients, key, entries)
        fault = fault_of_round(entries, answers, place.store.get(key))
        wrong += [fault] if fault else []
        _raise_if_mute(answers)
    return _told(f"{racers} threads", rounds, wrong)


def race_of_processes(place: Place, racers: int, rounds: int) -> tuple[str, bool]:
    """(what happened, whether it was wrong)."""
    wrong = []
    with RacingProcesses(place.prefix_url, racers) as processes:
        processes.wait_until_ready(place.box.left_s())
        for number in range(rounds):
            key = f"race/processes-{number:04d}"
            place.remember(key)
            entries = _entries(key, racers)
            replies = processes.race(key, entries, place.box.left_s())
            answers = [Answer(reply.won, reply.holder, reply.trouble) for reply in replies]
            fault = fault_of_round(entries, answers, place.store.get(key))
            wrong += [fault] if fault else []
            _raise_if_mute(answers)
    return _told(f"{racers} processes", rounds, wrong)


def _entries(key: str, racers: int) -> list[bytes]:
    return [f"racer {racer} of {key} ".encode() + noise(f"{key} {racer}", RACE_BYTES) for racer in range(racers)]


def _race(clients: Sequence[Store], key: str, entries: Sequence[bytes]) -> list[Answer]:
    """Everybody at once."""
    answers = [Answer(False, trouble="no answer")] * len(clients)
    gun = threading.Barrier(len(clients))

    def run(racer: int) -> None:
        gun.wait(GET_READY_S)
        try:
            outcome = clients[racer].create(key, entries[racer])
        except DilocoError as error:
            answers[racer] = Answer(False, trouble=str(error))
            return
        won = isinstance(outcome, Created)
        answers[racer] = Answer(won, entries[racer] if isinstance(outcome, Created) else outcome.data)

    threads = [threading.Thread(target=run, args=(racer,), daemon=True) for racer in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _raise_if_mute(answers: Sequence[Answer]) -> None:
    """A race in which nobody was told anything proves nothing."""
    if all(answer.trouble for answer in answers):
        raise StoreUnavailableError(answers[0].trouble)


def _told(who: str, rounds: int, wrong: Sequence[str]) -> tuple[str, bool]:
    if wrong:
        return f"{who}: {len(wrong)} of {rounds} rounds went wrong: {wrong[0]}", True
    return f"{who}, {rounds} rounds: one winner each", False
