"""What the log says of the run's held-out loss: the last evaluations that were well, a jump that nothing has followed
yet, and an open question: whose deltas made the loss jump.

Folded commit by commit, so that a syncer that takes over goes on where the log stands (rules/divergence.py decides what
follows, rules/rejudging.py who is blamed). Whether an evaluation has jumped is said by its commit.
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


class Rejudging(Struct, frozen=True):
    """The deltas merged after `good` and up to `head`, whose loss jumped, are re-judged: those of the learners `names`,
    sorted."""

    good: Evaluated
    head: Evaluated
    names: tuple[str, ...]


class Stability(Struct, frozen=True):
    """`good`: the newest evaluations without a jump, the newest last; `jump`: the newest evaluation, if it has jumped
    and no rollback or stop has followed; `rejudging`: the open question. `rollbacks`: so many times the syncer has gone
    back without an evaluation that was well beyond `beyond` tokens, where the loss last jumped. `paused`: the syncer
    has stopped the run for this, and nobody has resumed it."""

    good: tuple[Evaluated, ...] = ()
    jump: Evaluated | None = None
    rejudging: Rejudging | None = None
    rollbacks: int = 0
    beyond: int = 0
    paused: bool = False


def stability_after(known: Stability, commit: commits.Commit, suspects: tuple[str, ...] = ()) -> Stability:
    """After one more commit. `suspects`, for a rollback that answers a jump: whose deltas are to be re-judged."""
    match commit:
        case commits.Evaluation():
            return _evaluated(known, commit)
        case commits.Rollback():
            return _rolled_back(known, commit, suspects)
        case commits.Quarantine() if known.rejudging is not None and commit.learner in known.rejudging.names:
            return replace(known, rejudging=None)
        case commits.Stop() if commit.diverged:
            return replace(known, rejudging=None, paused=True)
        case commits.EpochStart() if commit.serves and known.paused:
            return _resumed(known)
    return known


def _evaluated(known: Stability, commit: commits.Evaluation) -> Stability:
    at = Evaluated(commit.evaluated, commit.loss, commit.tokens)
    if commit.jumped:
        return replace(known, jump=at)
    beyond = commit.tokens > known.beyond
    return replace(
        known, good=(*known.good, at)[-GOOD_KEPT:], jump=None, rollbacks=0 if beyond else known.rollbacks
    )  # fmt: skip


def _rolled_back(known: Stability, commit: commits.Rollback, suspects: tuple[str, ...]) -> Stability:
    """Evaluations of undone merges no longer count."""
    jump, good = known.jump, tuple(at for at in known.good if at.n <= commit.to)
    known = replace(known, good=good, jump=None)
    if commit.evaluated is None or jump is None:
        return known
    rejudging = Rejudging(good[-1], jump, suspects) if good and suspects else None
    return replace(
        known, rollbacks=known.rollbacks + 1, beyond=max(known.beyond, jump.tokens), rejudging=rejudging
    )  # fmt: skip


def _resumed(known: Stability) -> Stability:
    """People have decided: they went back, or accept the loss as it is, which nothing before it is compared with."""
    good = known.good if known.jump is None else ()
    return Stability(good=good)
