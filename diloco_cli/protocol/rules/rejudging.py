"""Who made the loss jump: decided from trials, which repeat the recorded merges without the deltas of some learners.

    1  by bisection over the recorded versions, the first commit after the good one whose loss has jumped. Later deltas
       were made from a damaged model, and would say little about their learners
    2  the learners are halved again and again, and the merges up to that commit are repeated without each half. A half
       heals if the loss then stays within the bound, and rises at most half as much. Where exactly one half heals, it
       has the culprit. Two trials a level: 12 for 64 learners
    3  trials with the deltas of one learner each: where another one raises the loss as well, the run diverges by
       itself, and it was chance that one half healed. They also tell a run that diverges everywhere from one with
       several bad learners

Where a trial cannot be made, nobody is blamed: its own learner may have taken the payload away. The verdict then names
the learner whose recorded deltas were clearly too long, for people to decide. An honest learner must never be held
back, so everything that is not clear blames nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite

from diloco_cli.protocol.log.stability import Rejudging
from diloco_cli.protocol.rules.divergence import jumped

ALONE = 8  # learners whose deltas are tried alone
HEALED = 0.5  # of the full rise: what is left of it at most where a trial heals
TOO_LONG = 4.0  # times the usual norm: told of one learner above this, if no other is even long
NEW_RUN = "start a run with a lower train.inner.lr or outer.lr: diloco launch"


@dataclass(frozen=True)
class LeaveOut:
    """The merges after commit `good` up to commit `head` once more, without the deltas of these learners (sorted). With
    all of them they give the recorded versions."""

    good: int
    head: int
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ruling:
    """The learner to blame, None for nobody, and why."""

    learner: str | None
    reason: str


Losses = Mapping[LeaveOut, float | None]
"""The held-out loss after each trial; None where it could not be made."""


class _Unknown(Exception):
    """A trial that must be made first."""

    def __init__(self, trial: LeaveOut) -> None:
        super().__init__(trial)
        self.trial = trial


class _Failed(_Unknown):
    """A trial that could not be made."""


def next_step(case: Rejudging, losses: Losses, limit: float) -> LeaveOut | Ruling:
    """The trial to make next, or the verdict. `limit`: the highest loss that is no jump."""
    try:
        return _judged(_Case(case, losses, limit))
    except _Failed as failed:
        return unjudged(case, f"{_text(failed.trial)} cannot be evaluated: see the syncer's own output")
    except _Unknown as unknown:
        return unknown.trial


class _Case:
    """The case as its trials show it. `onset`: the first commit whose loss has jumped, to `full`."""

    def __init__(self, case: Rejudging, losses: Losses, limit: float) -> None:
        self.good, self.head, self.names = case.good, case.head, case.names
        self.losses, self.limit = losses, limit
        self.onset = self._onset()
        self.full = self.loss(self.onset)

    def loss(self, head: int, without: tuple[str, ...] = ()) -> float:
        """Raises _Unknown or _Failed. What is not finite counts as endless."""
        if head == self.head.n and not without:
            return inf if self.head.loss is None else self.head.loss
        trial = LeaveOut(self.good.n, head, tuple(sorted(without)))
        if trial not in self.losses:
            raise _Unknown(trial)
        loss = self.losses[trial]
        if loss is None:
            raise _Failed(trial)
        return loss if isfinite(loss) else inf

    def _onset(self) -> int:
        well, ill = self.good.n, self.head.n
        while ill - well > 1:
            middle = (well + ill) // 2
            if jumped(self.loss(middle), self.limit):
                ill = middle
            else:
                well = middle
        return ill

    def heals(self, without: tuple[str, ...]) -> bool:
        """Whether the loss neither jumps nor goes on rising without these."""
        loss, good = self.loss(self.onset, without), self.good.loss or 0.0
        return not jumped(loss, self.limit) and loss - good <= HEALED * (self.full - good)

    def harms_alone(self, name: str) -> bool:
        return not self.heals(tuple(other for other in self.names if other != name))


def _judged(case: _Case) -> Ruling:
    suspect = _suspect(case)
    others = [name for name in case.names if name != suspect]
    if suspect is None or any(case.harms_alone(name) for name in others[:ALONE]):
        return _nobody(case)
    losses = f"{case.full:.4g} after commit {case.onset}, {case.loss(case.onset, (suspect,)):.4g} without them"
    return Ruling(suspect, f"its deltas alone made the loss jump: {losses}, {case.good.loss:.4g} at {case.good.n}")


def _suspect(case: _Case) -> str | None:
    """The only learner without which the loss does not jump."""
    suspects = case.names
    while len(suspects) > 1:
        halves = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        healing = [half for half in halves if case.heals(half)]
        if len(healing) != 1:
            return None
        suspects = healing[0]
    return suspects[0] if len(case.names) > 1 else None


def _nobody(case: _Case) -> Ruling:
    tried = case.names[:ALONE]
    raising = [name for name in tried if case.harms_alone(name)]
    what = f"the loss jumps to {case.full:.4g} after commit {case.onset}"
    if len(case.names) < 2:
        only = f"by the deltas of {', '.join(case.names)}, the only ones since: there is nobody to compare them with"
        return Ruling(None, f"{what} {only}; if they are honest, {NEW_RUN}")
    if 2 * len(raising) > len(tried):
        most = "each learner" if len(raising) == len(tried) else f"{len(raising)} of {len(tried)} learners, each"
        return Ruling(None, f"{what} by the deltas of {most} alone: the run diverges everywhere; {NEW_RUN}")
    if raising:
        return Ruling(None, f"{what}, and no learner alone is to blame: each by itself, {', '.join(raising)} raise it")
    return Ruling(None, f"{what}, and no learner alone is to blame: only their deltas together raise it")


def unjudged(case: Rejudging, why: str) -> Ruling:
    """Nobody is blamed, for this reason; with what the norms of the recorded deltas say."""
    long = sorted(case.long)
    if len(long) == 1 and len(case.names) > 1 and long[0] in case.names and case.long[long[0]] > TOO_LONG:
        times = (
            f"the longest delta of {long[0]} has {case.long[long[0]]:.1f} times the usual norm, no other one is long"
        )
        return Ruling(None, f"{why}; {times}")
    return Ruling(None, f"{why}, and the norms of the deltas blame nobody")


def _text(trial: LeaveOut) -> str:
    without = f" without the deltas of {', '.join(trial.without)}" if trial.without else ""
    return f"commit {trial.head}{without}"
