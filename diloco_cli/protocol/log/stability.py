"""What the log says of the run's held-out loss: the last evaluations that were well, and a jump that nothing has
followed yet.

Folded commit by commit, so that a syncer that takes over goes on where the log stands (rules/divergence.py decides what
follows). Whether an evaluation has jumped is said by its commit.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from diloco_cli.protocol.log import commits

GOOD_KEPT = 5


class Evaluated(Struct, frozen=True):
    """The held-out loss as of commit n, when `tokens` were merged. None: the model gives no finite loss."""

    n: int
    loss: float | None
    tokens: int


class Stability(Struct, frozen=True):
    """`good`: the newest evaluations without a jump, the newest last; `jump`: the newest evaluation, if it has jumped
    and no rollback or stop has followed. `recovers_beyond`: the syncer has gone back, and the run has not recovered
    until an evaluation is well with more tokens than these; None: it has. `paused`: the syncer has stopped the run for
    a jump, and nobody has resumed it. `since`: slots since the newest evaluation was logged."""

    good: tuple[Evaluated, ...] = ()
    jump: Evaluated | None = None
    recovers_beyond: int | None = None
    paused: bool = False
    since: int = 0


def stability_after(known: Stability, commit: commits.Commit) -> Stability:
    """After one more commit."""
    match commit:
        case commits.Merge() | commits.Skip():
            return replace(known, since=known.since + 1)
        case commits.Evaluation():
            return _evaluated(known, commit)
        case commits.Rollback():
            return _rolled_back(known, commit)
        case commits.Stop() if commit.diverged:
            return replace(known, paused=True)
        case commits.EpochStart() if commit.serves and known.paused:
            return _resumed(known)
    return known


def _evaluated(known: Stability, commit: commits.Evaluation) -> Stability:
    at = Evaluated(commit.evaluated, commit.loss, commit.tokens)
    known = replace(known, since=0)
    if commit.jumped:
        return replace(known, jump=at)
    recovers = known.recovers_beyond
    recovered = recovers is None or commit.tokens > recovers
    return replace(
        known, good=(*known.good, at)[-GOOD_KEPT:], jump=None, recovers_beyond=None if recovered else recovers
    )


def _rolled_back(known: Stability, commit: commits.Rollback) -> Stability:
    """Evaluations of undone merges no longer count."""
    jump, good = known.jump, tuple(at for at in known.good if at.n <= commit.to)
    known = replace(known, good=good, jump=None)
    if commit.evaluated is None or jump is None:
        return known
    return replace(known, recovers_beyond=jump.tokens)


def _resumed(known: Stability) -> Stability:
    """People have decided: they went back, or accept the loss as it is, which nothing before it is compared with."""
    good = known.good if known.jump is None else ()
    return Stability(good=good, since=known.since)
