"""The pace of a run's merges, and the best pace that it has sustained: for people only.

The pace of a window of merges is the tokens of their offers over its time, each offer counted in full: so it does not
depend on the sizes of fragments. What a run does for WINDOWS in a row it sustains. One window alone shows nothing:
after an outage the offers that have piled up are merged as fast as the syncer can.
"""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from diloco_cli.protocol.log import commits

WINDOW_MERGES, WINDOW_S = 10, 5.0  # at least
WINDOWS = 5


class Sustained(Struct, frozen=True):
    """Of the present window: `since` its beginning ("": none has begun), `tokens`, `merges`. `last`: seconds and tokens
    of the window before. `rates`: tokens per second of the newest windows; `best`: the highest sustained."""

    since: str = ""
    tokens: int = 0
    merges: int = 0
    last: tuple[float, int] = (0.0, 0)
    rates: tuple[float, ...] = ()
    best: float = 0.0


def sustained_after(known: Sustained, commit: commits.Commit) -> Sustained:
    match commit:
        case commits.Merge():
            return _merged(known, commit)
        case commits.EpochStart() | commits.Rollback() | commits.Stop():  # what follows is not the same stretch
            return Sustained(best=known.best)
    return known


def _merged(known: Sustained, commit: commits.Merge) -> Sustained:
    if not known.since:
        return replace(known, since=commit.time)
    tokens, merges = known.tokens + sum(item.tokens for item in commit.inputs), known.merges + 1
    seconds = _seconds(known.since, commit.time)
    if seconds < 0:  # another clock: begin anew
        return Sustained(since=commit.time, best=known.best)
    if merges < WINDOW_MERGES or seconds < WINDOW_S:
        return replace(known, tokens=tokens, merges=merges)
    rates = (*known.rates, tokens / seconds)[-WINDOWS:]
    best = max(known.best, min(rates)) if len(rates) == WINDOWS else known.best
    return Sustained(commit.time, 0, 0, (seconds, tokens), rates, best)


def _seconds(earlier: str, later: str) -> float:
    """Below 0 for what is no time."""
    try:
        return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except (ValueError, TypeError):
        return -1.0


def share_of_best(known: Sustained, so_far_s: float) -> float | None:
    """The present pace over the best sustained one; `so_far_s`: of the present window. None: it cannot be said yet."""
    seconds, tokens = known.last[0] + so_far_s, known.last[1] + known.tokens
    if not known.best or not known.last[0]:
        return None
    return tokens / seconds / known.best
