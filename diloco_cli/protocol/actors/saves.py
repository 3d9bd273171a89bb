"""The inner optimizer's saved moments: which there are, as of which commit, and the way back to them."""

from __future__ import annotations

REMEMBERED = 16  # the newest saves; an older one is hardly worth going back to


class Saves:
    """Keys of this process's saves, each with the newest commit that was known when it was made. The upload lane adds,
    the training asks."""

    def __init__(self) -> None:
        self._saves: tuple[tuple[int, str], ...] = ()
        self._rollbacks: tuple[tuple[int, int], ...] = ()

    def add(self, key: str, n: int) -> None:
        left = (save for save in self._saves if self._counts(save[0]))  # or those would take the place of what counts
        self._saves = (*left, (n, key))[-REMEMBERED:]

    @property
    def newest(self) -> str | None:
        """What offers name. A save that a rollback has overtaken on its way counts for nothing."""
        return next((key for n, key in reversed(self._saves) if self._counts(n)), None)

    def _counts(self, n: int) -> bool:
        return all(n <= to or n >= at for to, at in self._rollbacks)

    def go_back(self, rollbacks: tuple[tuple[int, int], ...]) -> str | None:
        """`rollbacks`: as in RunState. What was saved between the two commits of one, or is yet to come from there,
        counts for nothing. Returns the newest save that is left."""
        self._rollbacks = rollbacks
        return self.newest

    def forget(self) -> None:
        """None of them could be restored."""
        self._saves = ()
