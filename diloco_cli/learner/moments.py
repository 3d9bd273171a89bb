"""The inner optimizer's saved moments: which there are, as of which commit, and the way back to them."""

from __future__ import annotations

import threading

from diloco_cli.digests import digest
from diloco_cli.learner.inner import keeps_moments, restore_inner_state
from diloco_cli.learner.replica import Replica
from diloco_cli.store.keys import BadKeyError
from diloco_cli.store.port import Store

REMEMBERED = 16  # the newest saves; an older one is hardly worth going back to


class SavedMoments:
    """Keys of this process's saves, each with the newest commit that was known when it was made. The uploader adds,
    the training thread asks. `newest` is what offers name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: list[tuple[int, str]] = []
        self._from_n = 0
        self.newest: str | None = None

    def add(self, key: str, n: int) -> None:
        """A save that a rollback has overtaken on its way counts for nothing."""
        with self._lock:
            if n >= self._from_n:
                self._saves = [*self._saves, (n, key)][-REMEMBERED:]
                self.newest = key

    def go_back(self, to: int, rolled_back_at: int) -> str | None:
        """Forget what was saved after commit `to`, and what is yet to come from before `rolled_back_at`. Returns the
        newest save that is left."""
        with self._lock:
            self._from_n = rolled_back_at
            self._saves = [save for save in self._saves if save[0] <= to]
            self.newest = self._saves[-1][1] if self._saves else None
            return self.newest

    def forget(self) -> None:
        """None of them could be restored."""
        with self._lock:
            self._saves, self.newest = [], None


def fetch_moments(store: Store, key: str | None, most_bytes: int) -> bytes | None:
    """Saved moments, if they are the very bytes that their key names. Offers carry such keys: a stranger's word."""
    if key is None:
        return None
    try:
        data = store.get(key, most_bytes)
    except BadKeyError:
        return None
    return data if data is not None and key.endswith(digest(data)) else None


def restore_moments(replica: Replica, data: bytes | None) -> bool:
    """Put them into the optimizer; False if they are none of this model's."""
    return data is not None and restore_inner_state(replica.model, replica.optimizer, data)


def restore_or_reset(replica: Replica, data: bytes | None) -> bool:
    """After a rollback: the moments of before, else none at all. True if some were lost."""
    if not keeps_moments(replica.optimizer) or restore_moments(replica, data):
        return False
    replica.optimizer.state.clear()
    return True
