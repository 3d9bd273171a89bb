"""Exclusive create under races: of all racers that create a key at one time, exactly one wins, and all agree on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from diloco_cli.doctor.place import Place, noise
from diloco_cli.doctor.racing_processes import RaceAnswer, answer_to, race, racing_processes
from diloco_cli.doctor.verdicts import Finding, failed, passed
from diloco_cli.store.port import Store, StoreUnavailableError

RACE_BYTES = 2000
GET_READY_S = 10.0


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
    if not problems:
        return passed(detail)
    return failed(detail, "no run is safe here: use a store whose create is exclusive (GCS, S3, a local directory)")


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
    answers = [RaceAnswer(False, trouble="no answer")] * len(clients)
    gun = threading.Barrier(len(clients))

    def run(racer: int) -> None:
        gun.wait(GET_READY_S)
        answers[racer] = answer_to(clients[racer], key, entries[racer])

    threads = [threading.Thread(target=run, args=(racer,), daemon=True) for racer in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
