"""What every daemon needs: it hears SIGTERM and SIGINT between two steps, and never dies of its own log."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import TerminatedError

STDOUT = 1


class Stopping:
    """Whether a signal has asked this process to end, and for how long it has known."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._since_s = 0.0

    def hear_signals(self) -> None:
        """From now on, SIGTERM and SIGINT only ask. Call it on the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def ask(self) -> None:
        if not self._event.is_set():
            self._since_s = monotonic_s()
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep; a stop cuts it short."""
        self._event.wait(max(0.0, seconds))

    def check(self, grace_s: float = 0.0) -> None:
        """Raise TerminatedError once the stop was asked for at least `grace_s` ago."""
        if self._event.is_set() and monotonic_s() - self._since_s >= grace_s:
            raise TerminatedError("stopped by a signal")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask()


def say(line: str) -> None:
    """One line of a daemon's log. A full disk or a reader that has gone loses the line, never the daemon."""
    with suppress(OSError):
        os.write(STDOUT, f"{line}\n".encode())
