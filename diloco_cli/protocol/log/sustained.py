"""The pace of a run's merges, and the best paces that it has sustained: for people only.

The pace of a window of merges is the tokens of their offers over its time, each offer counted in full: so it does not
depend on the sizes of fragments. What a run does for WINDOWS in a row it sustains. One window alone shows nothing:
after an outage the offers that have piled up are merged as fast as the syncer can. A best pace is that of so many
learners: what more of them did says nothing of those that are left when guests have gone.
"""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from diloco_cli.protocol.log import commits

WINDOW_MERGES, WINDOW_S = 10, 5.0  # at least
WINDOWS = 5
MAX_BESTS = 16


class Sustained(Struct, frozen=True):
    """Of the present window: `since` its beginning ("": none has begun), `tokens`, `merges`, `alive` at most. `last`:
    seconds and tokens of the window before. `rates`: tokens per second of the newest windows, `crews`: learners alive
    in each. `bests`: (learners alive, tokens per second sustained), both rising: what fewer did as fast is not there
    for more."""

    since: str = ""
    tokens: int = 0
    merges: int = 0
    alive: int = 0
    last: tuple[float, int] = (0.0, 0)
    rates: tuple[float, ...] = ()
    crews: tuple[int, ...] = ()
    bests: tuple[tuple[int, float], ...] = ()

    def best(self, learners: int) -> float:
        """The best pace that at most so many learners sustained; 0: none yet."""
        return max((rate for crew, rate in self.bests if crew <= learners), default=0.0)


def sustained_after(known: Sustained, commit: commits.Commit) -> Sustained:
    match commit:
        case commits.Merge():
            return _merged(known, commit)
        case commits.EpochStart() | commits.Rollback() | commits.Stop():  # what follows is not the same stretch
            return Sustained(bests=known.bests)
    return known


def _merged(known: Sustained, commit: commits.Merge) -> Sustained:
    if not known.since:
        return replace(known, since=commit.time)
    tokens, merges = known.tokens + sum(item.tokens for item in commit.inputs), known.merges + 1
    alive = max(known.alive, commit.alive, len(commit.inputs))
    seconds = _seconds(known.since, commit.time)
    if seconds < 0:  # another clock: begin anew
        return Sustained(since=commit.time, bests=known.bests)
    if merges < WINDOW_MERGES or seconds < WINDOW_S:
        return replace(known, tokens=tokens, merges=merges, alive=alive)
    rates, crews = (*known.rates, tokens / seconds)[-WINDOWS:], (*known.crews, alive)[-WINDOWS:]
    bests = _with_best(known.bests, max(crews), min(rates)) if len(rates) == WINDOWS else known.bests
    return Sustained(commit.time, last=(seconds, tokens), rates=rates, crews=crews, bests=bests)


def _with_best(bests: tuple[tuple[int, float], ...], crew: int, rate: float) -> tuple[tuple[int, float], ...]:
    if any(others <= crew and best >= rate for others, best in bests):
        return bests
    kept = [(others, best) for others, best in bests if others < crew or best > rate]
    return tuple(sorted([*kept, (crew, rate)])[-MAX_BESTS:])


def _seconds(earlier: str, later: str) -> float:
    """Below 0 for what is no time."""
    try:
        return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except (ValueError, TypeError):
        return -1.0


def share_of_best(known: Sustained, so_far_s: float, learners: int) -> float | None:
    """The present pace over the best that at most so many learners sustained; `so_far_s`: of the present window. None:
    it cannot be said yet."""
    seconds, tokens, best = known.last[0] + so_far_s, known.last[1] + known.tokens, known.best(learners)
    return tokens / seconds / best if best and known.last[0] else None
