"""What a supervisor listens to without waiting for it: signals, and the state of the run in the bucket."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from diloco_cli.errors import DilocoError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalCount:
    """Counts requests to stop. An ignored signal stays ignored (`nohup`). Only the main thread can hear."""

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
        self.trouble: str | None = None

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    @property
    def answer(self) -> str | None:
        """The latest one, None before the first; raises what was no declared error, for that is a bug."""
        if self._bug is not None:
            raise self._bug
        return self._answer

    def fresh_answer(self, timeout_s: float) -> str | None:
        """An answer to a question asked after this call, or the latest one if none comes in time."""
        for _ in range(2):  # the first may be the answer to a question asked before
            self._answered.clear()
            self._answered.wait(timeout_s / 2)
        return self.answer

    def _loop(self) -> None:
        while not self._ended.is_set():
            try:
                self._answer = self._ask()
                self.trouble = None
            except DilocoError as error:
                self.trouble = str(error)
            except Exception as error:
                self._bug = error
                self._ended.set()
            self._answered.set()
            self._ended.wait(self._every_s)


class OnceInBackground:
    """One call in a thread; `trouble` is why it failed."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name="request-stop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            # The units are stopped by signals all the same; what went wrong is told by the supervisor.
            self.trouble = f"{type(error).__name__}: {error}"
