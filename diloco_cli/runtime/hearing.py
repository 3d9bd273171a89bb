"""What a supervisor takes in without waiting for it: signals, the run's state, answers of single calls."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import DilocoError
from diloco_cli.store.port import StoreGoneError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Result = TypeVar("Result")


class SignalCount:
    """Counts signals to stop. An ignored signal stays ignored (`nohup`). Only the main thread can count signals. A
    SIGHUP counts as the first one only: a terminal that closes may send several, and a second signal kills."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalCount:
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP and self.count:
            return
        self.count += 1
        self.first = self.first or signum


class Asking:
    """Calls `ask` again and again in a thread, so that a slow store never delays a restart."""

    def __init__(self, ask: Callable[[], str], every_s: float) -> None:
        self._ask = ask
        self._every_s = every_s
        self._ended = threading.Event()
        self._answered = threading.Event()
        self._bug: Exception | None = None
        self._thread = threading.Thread(target=self._loop, name="run-state", daemon=True)
        self._answer: str | None = None
        self._gone_since_s: float | None = None
        self.trouble: str | None = None
        self.gone: StoreGoneError | None = None

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    @property
    def answer(self) -> str | None:
        """The latest answer, None before the first; raises an undeclared error of `ask`, because that is a bug."""
        if self._bug is not None:
            raise self._bug
        return self._answer

    def gone_for_s(self) -> float:
        """For how long there has been no such bucket, as far as the calls show; `gone` is their error."""
        return 0.0 if self._gone_since_s is None else monotonic_s() - self._gone_since_s

    def fresh_answer(self, timeout_s: float) -> str | None:
        """An answer to a question asked after this call, or the latest one if none comes in time."""
        for _ in range(2):  # the first answer may come from a call of `ask` that began before
            self._answered.clear()
            self._answered.wait(timeout_s / 2)
        return self.answer

    def _loop(self) -> None:
        while not self._ended.is_set():
            try:
                self._answer = self._ask()
                self.trouble = self.gone = self._gone_since_s = None
            except StoreGoneError as error:
                self.trouble, self.gone = str(error), error
                self._gone_since_s = monotonic_s() if self._gone_since_s is None else self._gone_since_s
            except DilocoError as error:
                self.trouble = str(error)
            except Exception as error:
                self._bug = error
                self._ended.set()
            self._answered.set()
            self._ended.wait(self._every_s)


class OnceInBackground(Generic[Result]):
    """One call in a thread; once it is `done`, `result` is its answer, or `trouble` why it failed."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self.result: Result | None = None
        self.trouble: str | None = None
        self.done = False
        self._thread = threading.Thread(target=self._run, name="once", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            # The units are ended by signals all the same; the supervisor reports the error.
            self.trouble = f"{type(error).__name__}: {error}"
        self.done = True
