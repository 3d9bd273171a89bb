"""The closest names to a mistyped one, for hints alone: nothing is ever looked up by likeness."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_NAMES = 4


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """Names that begin like `word` first, then those that look like it."""
    by_lower = {name.lower(): name for name in names}
    wanted = word.lower()
    starts = sorted(name for name in by_lower if len(wanted) >= 2 and name.startswith(wanted))
    similar = difflib.get_close_matches(wanted, by_lower, n=MAX_NAMES, cutoff=0.6)
    found = dict.fromkeys([*starts, *similar])
    return [by_lower[name] for name in found][:MAX_NAMES]


def suggestion(word: str, names: Iterable[str]) -> str:
    """'; did you mean a or b?' or nothing."""
    found = nearest(word, names)
    return f"; did you mean {' or '.join(found)}?" if found else ""
