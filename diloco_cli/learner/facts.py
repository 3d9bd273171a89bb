"""A learner process's reports: its log, and the figures of its heartbeat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.methods import INNER_OPTIMIZERS
from diloco_cli.protocol.actors.observer import Incarnation, Observer, Phase
from diloco_cli.runtime.daemon import say

RATE_SMOOTHING = 0.05
RECENT_S, MOST_MARKS = 60.0, 64  # of busy time: what shares of time are of; and heartbeats to reckon them from
BEHIND_THE_LOOP: tuple[Phase, ...] = ("hear", "offer", "wait", "save")  # phases that training alone would not have


@dataclass(frozen=True)
class TimeSpent:
    """Seconds so far: of busy time, of it what the exchange took, and what steps took; of these, waiting for data."""

    busy_s: float = 0.0
    blocked_s: float = 0.0
    step_s: float = 0.0
    data_s: float = 0.0


class Facts(Observer):
    """`blocked_s`: the part of its busy time that the exchange took; `step_s`: what its steps took after the first,
    which opens the data. Tokens per second: recent, and since it began. Shares of time are of the last minute.
    `tell`: takes what there is to say; default: this process's log."""

    def __init__(self, name: str, tell: Callable[[str], None] | None = None) -> None:
        self.say = tell or (lambda text: say(f"{utc_now_text()} {name}: {text}"))
        self._step_tokens = self.tokens = 0
        self.tokens_per_s = self.blocked_s = self.step_s = self.busy_s = 0.0
        self._stepped_s = monotonic_s()
        self._has_stepped = False
        self._marks = deque([TimeSpent()], maxlen=MOST_MARKS)

    def began(self, learner: Incarnation) -> None:
        joined, self._stepped_s = learner.joined, monotonic_s()
        moments = "new"
        if learner.moments_lost:
            moments = "lost, warming up anew" if joined.data_start > 0 else "none yet, warming up"
        elif not INNER_OPTIMIZERS[learner.run.settings.train.inner.name].moments:
            moments = "none"
        elif learner.saves.newest is not None:
            moments = "restored"
        self.say(
            f"incarnation {joined.incarnation} of run {learner.run.name} joins at commit {joined.state.n}, data from "
            f"token {joined.data_start:,}, inner moments {moments}"
        )

    def stepped(self, position: int, tokens: int) -> None:
        if not self.tokens:
            self.say("made its first step")
        self._step_tokens, self._stepped_s = tokens, monotonic_s()
        self.tokens += tokens

    def took(self, phase: Phase, seconds: float) -> None:
        self.busy_s += seconds
        if phase in BEHIND_THE_LOOP:
            self.blocked_s += seconds
        else:
            self.step_s += seconds if self._has_stepped else 0.0
            self._has_stepped = True
            rate = self._step_tokens / max(seconds, 1e-9)
            self.tokens_per_s += (rate - self.tokens_per_s) * (RATE_SMOOTHING if self.tokens_per_s else 1.0)

    def rolled_back(self, learner: Incarnation, to: int) -> None:
        since = "new" if learner.saves.newest is None else "from before"
        self.say(f"the run went back to commit {to}, inner moments {since}")

    def missed(self, text: str) -> None:
        self.say(f"{text}; waits for its successor")

    def heartbeat(self, passed: float, data_s: float | None = None) -> dict[str, Any]:
        """`passed`: the share of the present batch that was computed; `data_s`: how long steps waited for their data.
        The first step may take minutes, and until it ends there is nothing else to tell."""
        now = TimeSpent(self.busy_s, self.blocked_s, self.step_s, data_s or 0.0)
        since = self._since(now)
        return ({} if self.tokens else {"note": f"in its first step: {passed:.0%} of the batch"}) | {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "mean_tokens_per_s": round(self.tokens / (self.busy_s or 1.0), 1),
            "blocked_percent": _percent(now.blocked_s - since.blocked_s, now.busy_s - since.busy_s) or 0.0,
            "last_step_s": round(monotonic_s() - self._stepped_s, 1),
            "data_percent": None if data_s is None else _percent(now.data_s - since.data_s, now.step_s - since.step_s),
        }

    def _since(self, now: TimeSpent) -> TimeSpent:
        """What had been spent at the newest heartbeat that lies RECENT_S back, or at the oldest that is kept."""
        while len(self._marks) > 1 and now.busy_s - self._marks[1].busy_s >= RECENT_S:
            self._marks.popleft()
        since = self._marks[0]
        if now.busy_s > self._marks[-1].busy_s:
            self._marks.append(now)
        return since


def _percent(part_s: float, of_s: float) -> float | None:
    """None of no time; of a step that has not ended only the wait is known, so that it may seem to be more than all."""
    return round(min(100.0, 100 * part_s / of_s), 3) if of_s > 0.0 else None
