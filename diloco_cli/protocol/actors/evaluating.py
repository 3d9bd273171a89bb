"""The held-out loss of the run: when it is evaluated, and what follows when it jumps.

Evaluations are made one at a time by the evaluator, another process, so that merges go on. The log has all that
matters: an evaluation, with whether it jumped, and the rollback or the stop that answers a jump.
"""

from __future__ import annotations

from diloco_cli.layout import Layout
from diloco_cli.protocol.actors.ports import Evaluator
from diloco_cli.protocol.actors.requests import MAX_REASON, back_to, published_anew, return_to
from diloco_cli.protocol.log.commit_log import Pulse
from diloco_cli.protocol.log.commits import Commit, Evaluation, Stop
from diloco_cli.protocol.log.heartbeats import MOVED_BYTES_PER_S
from diloco_cli.protocol.log.keys import BYTES_PER_PARAMETER
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.divergence import evaluates_every, jump_of, response_to
from diloco_cli.protocol.rules.pacing import POLL_BOUNDS_S

FINAL_EVALUATION_S = 120.0  # and the time to read all states once
TRIES = 3  # of a rollback whose objects cannot be read
GO_ON = "go on from there: diloco resume"


def reading_s(layout: Layout) -> float:
    """How long an evaluator may need to read the states of a model: seconds for small ones, an hour for 20 billion
    parameters."""
    return BYTES_PER_PARAMETER * layout.num_parameters / MOVED_BYTES_PER_S


class Evaluations:
    """Of one syncer process."""

    def __init__(self, run: RunFormat, evaluator: Evaluator) -> None:
        self.run, self.settings, self.evaluator = run, run.settings.evaluation, evaluator
        self.last_slot = self.tokens = 0
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
        if state.slot - self.last_slot >= evaluates_every(self.run):
            self._submit(state, False)
        return None

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
            self.last_slot, self.tokens = state.slot, state.tokens(self.run.layout)
        return submitted

    def _heard(self, state: RunState) -> Evaluation | None:
        """What the evaluator has finished."""
        finished = self.evaluator.result()
        return None if finished is None else self._evaluation(state, *finished)

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
        if response.action == "none" or jump is None:
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


class NoEvaluator:
    """Implements ports.Evaluator where there is no model, or its code may not run: every evaluation fails at once."""

    def __init__(self) -> None:
        self._asked: int | None = None

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        self._asked = n
        return True

    def result(self) -> tuple[int, float | None] | None:
        asked, self._asked = self._asked, None
        return None if asked is None else (asked, None)

    def close(self) -> None:
        """There is no process to end."""


def pause(reason: str) -> Stop:
    return Stop(reason=reason[:MAX_REASON], diverged=True)
