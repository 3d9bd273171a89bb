"""The held-out loss of the run: when it is evaluated, and what follows when it jumps.

Evaluations and trials are made one at a time by the evaluator, another process, so that merges go on. The log has all
that matters: an evaluation, with whether it jumped; the rollback that answers a jump, and opens a re-judgement; the
quarantine or the stop that closes it. A syncer that takes over in between makes the open trials anew.
"""

from __future__ import annotations

from collections import Counter

from diloco_cli.layout import Layout
from diloco_cli.protocol.actors.collection import trusted_learners
from diloco_cli.protocol.actors.ports import Evaluator
from diloco_cli.protocol.actors.requests import MAX_REASON
from diloco_cli.protocol.actors.rollback import back_to, published_anew, return_to
from diloco_cli.protocol.log.commit_log import Pulse
from diloco_cli.protocol.log.commits import Commit, Evaluation, Quarantine, Stop
from diloco_cli.protocol.log.heartbeats import MOVED_BYTES_PER_S
from diloco_cli.protocol.log.keys import BYTES_PER_PARAMETER
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.stability import Rejudging
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.divergence import evaluates_every, jump_of, limit_of, response_to
from diloco_cli.protocol.rules.polling import POLL_BOUNDS_S
from diloco_cli.protocol.rules.rejudging import LeaveOut, Ruling, next_step, unjudged

FINAL_EVALUATION_S = 120.0  # and the time to read all states once
REJUDGED_WITHIN_S = 1800.0  # and the time to read them READINGS times; then the run pauses
READINGS = 6
TRIES = 3  # of a rollback whose objects cannot be read, and of a trial that fails
GO_ON = "go on from there: diloco resume"


def reading_s(layout: Layout) -> float:
    """How long an evaluator may need to read the states of a model: seconds for small ones, an hour for 20 billion
    parameters."""
    return BYTES_PER_PARAMETER * layout.num_parameters / MOVED_BYTES_PER_S


class Evaluations:
    """Of one syncer process. `losses`: what trials of the open re-judgement gave."""

    def __init__(self, run: RunFormat, evaluator: Evaluator) -> None:
        self.run, self.settings, self.evaluator = run, run.settings.evaluation, evaluator
        self.last_slot = self.tokens = 0
        self.asked: LeaveOut | None = None
        self.case: Rejudging | None = None
        self.losses: dict[LeaveOut, float | None] = {}
        self.failed: Counter[LeaveOut] = Counter()
        self.since_s = 0.0
        self.unreadable = 0

    def begin(self, state: RunState) -> None:
        """The slot of the newest evaluation is known from the log: often replaced syncers evaluate as often."""
        self.last_slot = state.slot - state.stability.since

    def due(self, state: RunState, epoch: int, pulse: Pulse) -> Steps[Commit | None]:
        """The commit that is due now, if any."""
        evaluation = self._heard(state)
        if evaluation is not None:
            return evaluation
        response = yield from self.response(state, epoch, pulse)
        if response is not None:
            return response
        case, jump = state.stability.rejudging, state.stability.jump
        is_due = self.asked is None and state.slot - self.last_slot >= evaluates_every(self.run)
        if is_due and (case is None or jump is None) and self._submit(state, False):
            return None
        return None if case is None else self._rejudged(state, case, (yield Now()))

    def last(self, state: RunState, pulse: Pulse) -> Steps[Evaluation | None]:
        """The run's last evaluation; None if it takes too long, or fails."""
        started_s: float = yield Now()
        submitted = False
        while (yield Now()) - started_s < FINAL_EVALUATION_S + reading_s(self.run.layout):
            yield from pulse()
            finished = self.evaluator.result()
            if submitted and finished is not None:
                return self._evaluation(state, *finished)
            submitted = submitted or self._submit(state, True)
            yield Sleep(POLL_BOUNDS_S[0])
        return None

    def _submit(self, state: RunState, final: bool) -> bool:
        submitted = self.evaluator.submit(state.n, state.outputs, final)
        if submitted:
            self.asked, self.last_slot, self.tokens = None, state.slot, state.tokens(self.run.layout)
        return submitted

    def _heard(self, state: RunState) -> Evaluation | None:
        """What the evaluator has finished: a trial, which is noted, or an evaluation."""
        finished = self.evaluator.result()
        if finished is None:
            return None
        trial, self.asked = self.asked, None
        if trial is None:
            return self._evaluation(state, *finished)
        self.failed[trial] += finished[1] is None
        if finished[1] is not None or self.failed[trial] >= TRIES:
            self.losses[trial] = finished[1]
        return None

    def _evaluation(self, state: RunState, n: int, loss: float | None) -> Evaluation | None:
        """None for one that failed, and for one of merges that a rollback has undone since."""
        if loss is None or n < state.base_floor:
            return None
        finite = loss if abs(loss) < float("inf") else None
        why = jump_of(finite, state.stability.good, self.settings)
        return Evaluation(evaluated=n, loss=finite, tokens=self.tokens, jumped=bool(why), reason=why)

    # -- what follows a jump ------------------------------------------------------------------------------------

    def response(self, state: RunState, epoch: int, pulse: Pulse) -> Steps[Commit | None]:
        """The rollback or the stop that answers a jump."""
        response, jump = response_to(state, self.settings), state.stability.jump
        if response.action in ("none", "wait") or jump is None:
            return None
        if response.action == "pause":
            return pause(response.reason)
        found = yield from return_to(self.run, state, response.to, pulse)
        problem = found if isinstance(found, str) else ""
        if not isinstance(found, str):
            outputs = yield from published_anew(
                self.run, found.then.outputs, state.n + 1, state.slot - 1, epoch, pulse
            )  # fmt: skip
            if not isinstance(outputs, str):
                self.unreadable = 0
                return back_to(found.then, outputs, response.reason, evaluated=jump.n)
            problem = outputs
        self.unreadable += 1
        if self.unreadable < TRIES:
            return None
        return pause(f"{response.reason}; no rollback to commit {response.to}: {problem}; {GO_ON}")

    def _rejudged(self, state: RunState, case: Rejudging, now_s: float) -> Commit | None:
        """Ask for the next trial; or the verdict's commit."""
        if case != self.case:
            self.case, self.since_s = case, now_s
            self.losses, self.failed = {}, Counter()
        within_s = REJUDGED_WITHIN_S + READINGS * reading_s(self.run.layout)
        if now_s - self.since_s > within_s:
            step: LeaveOut | Ruling = unjudged(case, f"no verdict came within {within_s / 60:.0f} minutes")
        else:
            step = next_step(case, self.losses, limit_of(case.before, self.settings))
        if isinstance(step, LeaveOut):
            if self.asked is None and self.evaluator.try_without(step):
                self.asked = step
            return None
        return self._verdict(state, case, step)

    def _verdict(self, state: RunState, case: Rejudging, verdict: Ruling) -> Commit:
        name, jump, went = verdict.learner, state.stability.jump, f"went back to commit {case.good.n}"
        if jump is not None:
            went += f", and the loss of commit {jump.n} has jumped again"
        if name is None:
            return pause(f"{went}: {verdict.reason}; or {GO_ON}")
        others, quorum = len(set(trusted_learners(state, self.run)) - {name}), self.run.settings.sync.quorum
        if others < quorum:
            few = f"without {name} {others} learners would be left, and the quorum is {quorum}"
            return pause(f"{went}: {name}: {verdict.reason}; {few}; {GO_ON}")
        return Quarantine(learner=name, evaluated=case.head.n, reason=verdict.reason[:MAX_REASON])


class NoEvaluator:
    """Implements ports.Evaluator where there is no model, or its code may not run: every evaluation fails at once."""

    def __init__(self) -> None:
        self._asked: int | None = None

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        self._asked = n
        return True

    def try_without(self, trial: LeaveOut) -> bool:
        self._asked = trial.head
        return True

    def result(self) -> tuple[int, float | None] | None:
        asked, self._asked = self._asked, None
        return None if asked is None else (asked, None)

    def close(self) -> None:
        """There is no process to end."""


def pause(reason: str) -> Stop:
    return Stop(reason=reason[:MAX_REASON], diverged=True)
