"""For every daemon: SIGTERM and SIGINT end it between two operations, and a log that cannot be written never does.

`opened`, `own_claim`: a daemon begins with an opened bucket and a claim that names its process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from diloco_cli import __version__
from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.errors import InterruptedRunError, TerminatedError
from diloco_cli.protocol.log.records import ProcessClaim
from diloco_cli.randomness import nonce
from diloco_cli.runtime.driver import SystemClock
from diloco_cli.store.open import open_store
from diloco_cli.store.retry import RetryingStore, RetryNews, background_store
from diloco_cli.store.throttle import ThrottledStore
from diloco_cli.store.wrapper import MeteredStore

STDOUT = 1


class StopSignal:
    """Whether a signal has asked this process to end, and when. `patience_s`: how long it may still finish its work;
    waits and retries go on as usual until then."""

    def __init__(self, patience_s: float = 0.0) -> None:
        self.patience_s = patience_s
        self._event = threading.Event()
        self._since_s = 0.0
        self._number: int | None = None

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

    def is_due(self, grace_s: float = 0.0) -> bool:
        """Whether the stop was asked for, and its patience and `grace_s` more have passed."""
        return self._event.is_set() and self._left_s(grace_s) <= 0

    def wait(self, seconds: float) -> None:
        """Sleep; a stop cuts it short, as far as its patience goes."""
        if not self._event.wait(max(0.0, seconds)):
            return
        sleep_s(min(max(0.0, seconds), max(0.0, self._left_s())))

    def check(self, grace_s: float = 0.0) -> None:
        """Raise TerminatedError once the stop is due."""
        if self.is_due(grace_s):
            raise self.error()

    def error(self) -> TerminatedError:
        """Its exit status says by which signal."""
        return InterruptedRunError("stopped by Ctrl-C") if self.by_hand else TerminatedError("stopped by a signal")

    @property
    def by_hand(self) -> bool:
        return self._number == signal.SIGINT

    def _left_s(self, grace_s: float = 0.0) -> float:
        return self.patience_s + grace_s - (monotonic_s() - self._since_s)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
        self.ask()


def say(line: str) -> None:
    """Write one line of a daemon's log. A full disk or a closed pipe loses the line and does not end the daemon, nor
    does text from the bucket that cannot be encoded."""
    with suppress(OSError):
        os.write(STDOUT, f"{line}\n".encode(errors="backslashreplace"))


def own_claim(ranks: int = 1) -> ProcessClaim:
    return ProcessClaim(0, nonce(), os.uname().nodename, os.getpid(), utc_now_text(), __version__, ranks)


def opened(
    url: str,
    stop: StopSignal,
    who: str = "",
    attend: Callable[[], object] = lambda: None,
    throttled: ThrottledStore | None = None,
) -> tuple[MeteredStore, RetryingStore, RetryNews, SystemClock]:
    """The bucket at `url`, metered and with retries; failures are reported in this process's log, after `who`.
    `attend` is called before each wait. `throttled`: the bucket, if the caller has opened it."""

    def wait(seconds: float) -> None:
        attend()
        stop.wait(seconds)

    meter = MeteredStore(throttled or ThrottledStore(open_store(url), wait))
    store, news = background_store(meter, wait, stop.is_set, lambda line: say(f"{utc_now_text()} {who}{line}"))
    return meter, store, news, SystemClock(monotonic_s, wait, stop.check)
