"""Whether an evaluated loss has jumped, and what follows from it: pure decisions on what the log says.

A loss has jumped if it is not finite, or above the best of the last good ones by more than all of

    evaluation.jump          nats (0.25 unless the run says otherwise)
    RELATIVE                 of that best loss
    SPREADS                  times their usual change: early losses change fast, short held-out sets are noisy

A loss that is no higher than the newest good one has not jumped: a rollback brings that very loss back. The first
evaluation of a run has nothing to be compared with, and counts as good if it is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from statistics import median
from typing import Literal

from diloco_cli.config.settings import EvaluationSettings
from diloco_cli.protocol.log.health import Evaluated
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunPhase, RunState

RELATIVE = 0.1
SPREADS = 3
OVERDUE = 4  # times the usual distance of evaluations: so old a good one does not keep the past from collection
LOOK = "see each learner's norm and cosine in diloco status; keep one out: diloco quarantine LEARNER"
OTHER_COMMITS = 16  # between two evaluations, beside merges and as many others


@dataclass(frozen=True)
class Response:
    """What the syncer does about a jump: go back to commit `to`, stop the run, or nothing; and why."""

    action: Literal["none", "rollback", "pause"]
    reason: str = ""
    to: int = 0


def limit_of(good: Sequence[Evaluated], settings: EvaluationSettings) -> float:
    """The highest loss that is no jump after these good ones."""
    losses = [at.loss for at in good if at.loss is not None]
    if not losses:
        return inf
    best = min(losses)
    usual = median(abs(later - earlier) for earlier, later in pairwise(losses)) if len(losses) > 1 else 0.0
    return max(best + max(settings.jump, RELATIVE * abs(best), SPREADS * usual), losses[-1])


def jumped(loss: float | None, limit: float) -> bool:
    return loss is None or not isfinite(loss) or loss > limit


def jump_of(loss: float | None, good: Sequence[Evaluated], settings: EvaluationSettings) -> str:
    """How an evaluated loss has jumped, in words; "" if it has not."""
    limit = limit_of(good, settings)
    if not jumped(loss, limit):
        return ""
    if loss is None or not isfinite(loss):
        return "the held-out loss is not finite"
    best = min(at.loss for at in good if at.loss is not None)
    return f"the held-out loss jumps to {loss:.4g}, from {best:.4g} at best of late; up to {limit:.4g} would be usual"


def response_to(state: RunState, settings: EvaluationSettings) -> Response:
    """What follows from a jump that nothing has followed yet: the run goes back once. If the loss jumps again before it
    has recovered, the cause is still there: a learner with bad deltas of usual length, or settings that diverge. People
    must tell these apart, so the run pauses."""
    known, jump = state.stability, state.stability.jump
    if jump is None or settings.on_divergence == "warn":
        return Response("none")
    good = next((at for at in reversed(known.good) if at.n >= state.gc_floor), None)
    what = f"the loss of commit {jump.n} has jumped to {_text(jump)}"
    ways = "go on as it is: diloco resume RUN"
    if good is not None:
        what += f", from {_text(good)} at commit {good.n}"
        ways += f"; go back first: diloco rollback RUN --to {good.n}"
    if settings.on_divergence == "pause":
        return Response("pause", f"{what}; {ways}")
    if good is None:
        return Response("pause", f"{what}, and no commit that evaluated well is kept to go back to; {ways}")
    if known.recovers_beyond is not None:
        return Response("pause", f"{what}, again after going back; {LOOK}; {ways}")
    return Response("rollback", what, good.n)


def _text(at: Evaluated) -> str:
    return "a number that is not finite" if at.loss is None else f"{at.loss:.4g}"


def evaluates_every(run: RunFormat) -> int:
    """Slots between two evaluations."""
    return run.settings.evaluation.every * run.num_fragments


def overdue_after(run: RunFormat) -> int:
    """Commits after which an evaluation is long overdue."""
    return OVERDUE * (2 * evaluates_every(run) + OTHER_COMMITS)


def needed_from(state: RunState, run: RunFormat) -> int | None:
    """The commit that a rollback by the syncer may need: collection does not pass it. None: there is none. Good
    evaluations that lie far back do not count, or the bucket would grow for ever with an evaluator that fails."""
    known = state.stability
    return known.good[-1].n if known.good and state.n - known.good[-1].n <= overdue_after(run) else None


def concern(state: RunState, run: RunFormat) -> str:
    """What people should know of the run's loss now, in words; "" if it is well."""
    known, jump = state.stability, state.stability.jump
    if known.paused:
        told = next((note.text for note in reversed(state.metrics.notes) if note.kind == "stop"), "")
        return f"the run pauses, as its loss has jumped; {told}"
    if jump is not None:
        return f"the loss of commit {jump.n} has jumped to {_text(jump)} (evaluation.on_divergence)"
    return _unwatched(state, run)


def _unwatched(state: RunState, run: RunFormat) -> str:
    """Why nobody would notice that the loss jumps; "" while evaluations come."""
    last = max((at.n for at in state.stability.good), default=0)
    if state.phase != RunPhase.RUNNING or state.n - max(last, state.base_floor) <= overdue_after(run):
        return ""
    return f"the loss is not evaluated since commit {last}: until it is, nobody sees a loss that jumps"
