"""The inner optimizer's saved moments: which there are, as of which commit, and the way back to them."""

from __future__ import annotations

from diloco_cli.protocol.records import MOST

REMEMBERED = 16  # the newest saves; an older one is hardly worth going back to


class Saves:
    """Keys of this process's saves, each with the newest commit that was known when it was made. The upload lane adds,
    the training asks."""

    def __init__(self) -> None:
        self._saves: tuple[tuple[int, str], ...] = ()
        self._gone = (MOST, 0)  # commits between these two lie behind a rollback, and so does what was saved there

    def add(self, key: str, n: int) -> None:
        self._saves = (*self._saves, (n, key))[-REMEMBERED:]

    @property
    def newest(self) -> str | None:
        """What offers name. A save that a rollback has overtaken on its way counts for nothing."""
        return next((key for n, key in reversed(self._saves) if self._counts(n)), None)

    def _counts(self, n: int) -> bool:
        return n <= self._gone[0] or n >= self._gone[1]

    def go_back(self, to: int, rolled_back_at: int) -> str | None:
        """Forget what was saved after commit `to`, and what is yet to come from before `rolled_back_at`. Returns the
        newest save that is left."""
        self._saves = tuple(save for save in self._saves if self._counts(save[0]))
        self._gone = (to, rolled_back_at)
        return self.newest

    def forget(self) -> None:
        """None of them could be restored."""
        self._saves = ()
