"""Where an examination works, a fresh random prefix that is empty again afterwards, and what its checks find."""

from __future__ import annotations

import hashlib
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from diloco_cli.errors import DilocoError
from diloco_cli.randomness import nonce
from diloco_cli.store.port import Store, StoreUnavailableError
from diloco_cli.store.retry import Retrying, RetryingStore
from diloco_cli.store.url import join_url, parse_url
from diloco_cli.store.wrappers import Deadline, PrefixedStore, StoreWrapper, TimeBoxedStore, call_within

CLEAN_UP_S = 6.0
CLEANERS = 8
UNHURRIED_S = 600.0
USE_ANOTHER = "no run is safe here: use a store that keeps what it confirmed (GCS, S3, Azure, a local directory)"

T = TypeVar("T")
Level = Literal["pass", "warn", "fail", "skip"]
"""warn: a run works, and a person should know. skip: the check does not apply here, or could not be tried because an
earlier one failed."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    detail: str
    hint: str = ""


def passed(detail: str) -> Finding:
    return Finding("pass", detail)


def warned(detail: str, hint: str = "") -> Finding:
    return Finding("warn", detail, hint)


def failed(detail: str, hint: str = "") -> Finding:
    return Finding("fail", detail, hint)


def skipped(detail: str) -> Finding:
    return Finding("skip", detail)


class Place:
    """Hands out clients that are limited to the prefix. Every key is noted before it is written, and the noted keys are
    deleted in the end; keys from listings are never deleted."""

    def __init__(self, open_again: Callable[[], Store], url: str, box: Deadline | None = None) -> None:
        self.prefix = f"doctor-{nonce()}"
        self.box = box or Deadline(UNHURRIED_S)
        self.url = url
        self.num_repeated, self.last_trouble = 0, ""
        self._open_again = open_again
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._num_writing = 0
        self._closed = False
        self._keys: set[str] = set()
        self._sessions: list[Store] = []
        self.store = self.client(0)

    @property
    def prefix_url(self) -> str:
        return join_url(self.url, self.prefix)

    def client(self, number: int = 1) -> Store:
        """One of several clients, each a session of its own like that of another machine; `store` is number 0. Calls
        with transient errors are repeated, as in a run, as long as the check has time."""
        patient = RetryingStore(self._boxed(number), math.inf, left_s=self.box.left_s, on_retry=self._note)
        return _Announced(PrefixedStore(patient, self.prefix), self.writing)

    def impatient_client(self) -> Store:
        """A client without retries, which raises the store's errors."""
        return _Announced(PrefixedStore(self._boxed(0), self.prefix), self.writing)

    def _boxed(self, number: int) -> Store:
        """Sessions are kept: some clients take half a second to start."""
        with self._lock:
            while len(self._sessions) <= number:
                self._sessions.append(TimeBoxedStore(self._open_again(), self.box, keeps_trying=True))
            return self._sessions[number]

    def patiently(self, verb: str, call: Callable[[], T]) -> T:
        """A call that is no verb of the port, repeated and bounded as theirs are."""
        patient = RetryingStore(self.store, math.inf, left_s=self.box.left_s, on_retry=self._note)
        return patient.persist(verb, lambda: call_within(self.box, call, self.url))

    def bare(self) -> Store:
        """A client of the whole store, without bounds: for what is no verb of the port."""
        return self._open_again()

    def remember(self, key: str) -> None:
        """Note a key that this process, or a racing process, is about to write."""
        with self._lock:
            self._keys.add(key)

    @contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """Around each write. Raises StoreUnavailableError once the clean-up has begun: an interrupted race must not
        write behind its back."""
        with self._lock:
            if self._closed:
                raise StoreUnavailableError("the examination is over")
            self._keys.add(key)
            self._num_writing += 1
        try:
            yield
        finally:
            with self._quiet:
                self._num_writing -= 1
                self._quiet.notify_all()

    def clean_up(self, seconds: float = CLEAN_UP_S) -> list[str]:
        """Deletes all that was written; the keys that could not be deleted."""
        self.box.restart(seconds)
        with self._quiet:
            self._closed = True
            self._quiet.wait_for(lambda: self._num_writing == 0, seconds / 2)
            left = sorted(self._keys, reverse=True)
        stuck: list[str] = []
        sweepers = [threading.Thread(target=self._sweep, args=(left, stuck), daemon=True) for _ in range(CLEANERS)]
        for sweeper in sweepers:
            sweeper.start()
        for sweeper in sweepers:
            sweeper.join(2 * seconds)
        self._remove_directories()
        return [f"{self.prefix}/{key}" for key in sorted(stuck)]

    def _sweep(self, left: list[str], stuck: list[str]) -> None:
        while True:
            with self._lock:
                if not left:
                    return
                key = left.pop()
            try:
                self.store.delete(key)
            except DilocoError:
                with self._lock:
                    stuck.append(key)

    def _remove_directories(self) -> None:
        """A directory store keeps empty directories, and the temporary file of a racer that was killed."""
        parsed = parse_url(self.url)
        if parsed.scheme == "file":
            shutil.rmtree(Path(parsed.place) / self.prefix, ignore_errors=True)

    def _note(self, retrying: Retrying) -> None:
        with self._lock:
            self.num_repeated += 1
            self.last_trouble = retrying.last_error


class _Announced(StoreWrapper):
    """A store that notes each key before it writes it."""

    def __init__(self, store: Store, writing: Callable[[str], AbstractContextManager[None]]) -> None:
        super().__init__(store)
        self._writing = writing

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        with self._writing(key) if verb in ("create", "put") else nullcontext():
            return call()


def noise(seed: str, num_bytes: int) -> bytes:
    """Random-looking bytes, the same for the same seed: bytes that compress or repeat could make a link look faster."""
    return hashlib.shake_128(seed.encode()).digest(num_bytes)
