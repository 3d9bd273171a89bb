"""What people hear while a store fails: a line in the log or on the screen, and a heartbeat of which `status` tells."""

from __future__ import annotations

import threading
from collections.abc import Callable

from diloco_cli import clock
from diloco_cli.store.retry import Retrying, failing_text

QUIET_S = 1.5
LINE_EVERY_S = 60.0
NEW_REASON_EVERY_S = 10.0
HEARTBEAT_EVERY_S = 3.0


class RetryNews:
    """`failing` and `answered` are the two hooks of a RetryingStore. A hiccup that passes within `QUIET_S` is not
    talked about; afterwards one line when it begins, one a minute while it lasts (sooner if the reason changes), and
    one when the store answers again.

    `heartbeat`, once it is set, writes the unit's heartbeat: the thread that usually does may be the very one
    that waits. It is called at most every three seconds and must not wait for long itself.
    """

    def __init__(self, say: Callable[[str], None], monotonic: Callable[[], float] = clock.monotonic_s) -> None:
        self.heartbeat: Callable[[], None] | None = None
        self._say, self._monotonic = say, monotonic
        self._lock = threading.Lock()
        self._said: tuple[str, float] | None = None
        self._next_heartbeat_s = 0.0

    def failing(self, retrying: Retrying) -> None:
        """A call has failed and will be repeated."""
        if clock.wall_s() - retrying.since_s >= QUIET_S:
            self._tell(retrying)
        if self.heartbeat is not None and self._is_heartbeat_due():
            self.heartbeat()

    def answered(self, retrying: Retrying) -> None:
        """A call that failed has its answer."""
        with self._lock:
            said, self._said = self._said, None
        if said is not None:
            self._say(f"store: answers again, after {clock.wall_s() - retrying.since_s:.0f} s")

    def _tell(self, retrying: Retrying) -> None:
        now_s = self._monotonic()
        with self._lock:
            if self._said is not None:
                reason, said_s = self._said
                if now_s < said_s + (LINE_EVERY_S if retrying.last_error == reason else NEW_REASON_EVERY_S):
                    return
            self._said = (retrying.last_error, now_s)
        self._say(f"store: {failing_text(retrying)}")

    def _is_heartbeat_due(self) -> bool:
        now_s = self._monotonic()
        with self._lock:
            if now_s < self._next_heartbeat_s:
                return False
            self._next_heartbeat_s = now_s + HEARTBEAT_EVERY_S
        return True
