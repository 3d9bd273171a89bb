"""One process of a toy run: python -m tests.studies.toy_process learner|float-learner|syncer URL [NAME]

The product's own protocol code, store clients, retries and signals, in processes without torch. A learner joins, keeps
its books, publishes and follows in three threads, as the product's does; a syncer reads, decides and commits.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diloco_cli import __version__
from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.errors import DilocoError
from diloco_cli.processes.daemon import Stopping, say
from diloco_cli.protocol.driver import SystemClock, perform
from diloco_cli.protocol.log import read_format
from diloco_cli.protocol.operations import Steps
from diloco_cli.protocol.records import Commit, ProcessClaim
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.syncer import Syncer
from diloco_cli.randomness import nonce
from diloco_cli.simulate.histories.integers import FailingEvaluator, IntegerArithmetic
from diloco_cli.simulate.histories.learner import Beliefs, Habits, Learner
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Created, Exists, ObjectStat, Store
from diloco_cli.store.retry import RetryingStore


class TakingTurns:
    """A store for threads that share their data as actors of a simulation do: one of them runs at a time, and lets the
    others go on while it waits for the store or for the clock."""

    def __init__(self, store: Store) -> None:
        self.url, self._store, self.turn = store.url, store, threading.Lock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def create(self, key: str, data: bytes) -> Created | Exists:
        with self.waiting():
            return self._store.create(key, data)

    def get(self, key: str, most_bytes: int | None = None) -> bytes | None:
        with self.waiting():
            return self._store.get(key, most_bytes)

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        with self.waiting():
            return self._store.get_range(key, start, end)

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        with self.waiting():
            return self._store.list(prefix, after, limit)

    def put(self, key: str, data: bytes) -> None:
        with self.waiting():
            self._store.put(key, data)

    def delete(self, key: str) -> None:
        with self.waiting():
            self._store.delete(key)

    def stat(self, key: str) -> ObjectStat | None:
        with self.waiting():
            return self._store.stat(key)


class FloatLearner(Learner):
    """The same learner whose fragments travel as float32 tensors, as the product's codecs write them."""

    poll_bounds_s = (0.3, 0.5)  # an emulated service and its proxy share the machine with the run

    def _value(self, cast: bytes) -> int:
        return round(array("f", cast[-4:])[0])

    def _payload(self, fragment: int, delta: int | str) -> bytes:
        return float_payload(float(delta), self.run.layout.fragments[fragment].num_parameters)


def float_payload(value: float, elements: int) -> bytes:
    """A safetensors file with one tensor: `values`, [elements] float32, all the same."""
    entry = {"values": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}
    header = json.dumps(entry, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + array("f", [value]).tobytes() * elements


def run_learner(url: str, name: str, kind: type[Learner], stop: Stopping) -> None:
    store = TakingTurns(_background_store(open_store(url), stop))

    def sleep(seconds: float) -> None:
        with store.waiting():
            stop.wait(seconds)

    clock = SystemClock(monotonic_s, sleep, stop.check)

    def in_turn(steps: Steps[Any]) -> None:
        try:
            with store.turn:
                perform(steps, store, clock)
        except BaseException as error:  # a thread that fails ends its process
            _end(error)

    def start(threads: list[Steps[Any]]) -> None:
        for steps in threads:
            threading.Thread(target=in_turn, args=(steps,), daemon=True).start()

    with store.turn:
        run = perform(read_format(url), store, clock)
        island = run.island(name)
        assert island is not None
        learner = kind(run, name, _claim(), nonce, Beliefs(), Habits(island.step_s), start)
        perform(learner.train(), store, clock)


def run_syncer(url: str, stop: Stopping) -> None:
    bare = open_store(url)
    store = _background_store(bare, stop)
    clock = SystemClock(monotonic_s, stop.wait, stop.check)
    run = perform(read_format(url), store, clock)

    def told(state: RunState, commit: Commit) -> None:
        say(f"{commit.time} commit {commit.n} {commit.kind}")

    syncer = Syncer(run, _claim(), IntegerArithmetic(run), FailingEvaluator(), utc_now_text, nonce, told)
    perform(syncer.serve(), store, clock, tries_once=bare)


def _background_store(store: Store, stop: Stopping) -> RetryingStore:
    return RetryingStore(
        store, sleep=stop.wait, stop=stop.is_set,
        on_retry=lambda failing: say(f"retrying {failing.verb}: {failing.last_error}"),
    )  # fmt: skip


def _claim() -> ProcessClaim:
    return ProcessClaim(0, nonce(), os.uname().nodename, os.getpid(), utc_now_text(), __version__)


def _end(error: BaseException) -> None:
    """The process's own exit status, from any thread."""
    say(f"error: {type(error).__name__}: {error}")
    os._exit(error.exit_status if isinstance(error, DilocoError) else 1)


def main() -> None:
    role, url, *names = sys.argv[1:]
    stop = Stopping()
    stop.hear_signals()
    try:
        if role == "syncer":
            run_syncer(url, stop)
        else:
            run_learner(url, names[0], FloatLearner if role == "float-learner" else Learner, stop)
    except Exception as error:
        _end(error)


if __name__ == "__main__":
    main()
