"""What runs in other processes during the contract tests; imports little, so that it starts fast."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
from multiprocessing.synchronize import Barrier

from diloco_cli.store.open import open_store
from diloco_cli.store.port import Created

CLIENTS = ["diloco_cli.store.gcs", "diloco_cli.store.obstore"]
Outcomes = list[bool]


def race_in_processes(url: str, num_processes: int, num_rounds: int) -> list[Outcomes]:
    """Each process tries to create the same keys at the same moments; per process, which rounds it won."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *CLIENTS])
    barrier = context.Barrier(num_processes)
    answers: multiprocessing.Queue[Outcomes] = context.Queue()
    processes = [
        context.Process(target=_race, args=(url, dict(os.environ), str(i), num_rounds, barrier, answers), daemon=True)
        for i in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        return [answers.get(timeout=120) for _ in processes]
    except queue.Empty as error:
        raise TimeoutError("the racing processes did not finish") from error
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _race(
    url: str, environment: dict[str, str], me: str, num_rounds: int, barrier: Barrier,
    answers: multiprocessing.Queue[Outcomes],
) -> None:  # fmt: skip
    os.environ.clear()
    os.environ.update(environment)  # not that of the process that all are forked from
    store = open_store(url)
    store.get("warm/up")  # the client is started before the gun
    won: Outcomes = []
    for number in range(num_rounds):
        barrier.wait(100)
        won.append(store.create(f"race/{number:06d}", f"{me} {number}".encode() * 50) == Created())
    answers.put(won)


def write_for_ever(url: str, size_bytes: int) -> None:
    """Creates and overwrites large objects until it is killed."""
    store = open_store(url)
    print("ready", flush=True)
    number = 0
    while True:
        store.create(f"new/{number:06d}", bytes([number % 256]) * size_bytes)
        store.put("same", bytes([number % 256]) * size_bytes)
        number += 1


if __name__ == "__main__":
    write_for_ever(sys.argv[1], int(sys.argv[2]))
