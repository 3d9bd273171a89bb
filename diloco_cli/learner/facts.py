"""A learner process's reports: its log, and the figures of its heartbeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.protocol.actors.observer import Incarnation, Observer, Phase
from diloco_cli.runtime.daemon import say

RATE_SMOOTHING = 0.05
BEHIND_THE_LOOP: tuple[Phase, ...] = ("hear", "offer", "wait", "save")  # phases that training alone would not have


class Facts(Observer):
    """`blocked_s`: the part of its busy time that the exchange took; `step_s`: what its steps took. Tokens per second:
    recent, and since it began.
    `tell`: takes what there is to say; default: this process's log."""

    def __init__(self, name: str, tell: Callable[[str], None] | None = None) -> None:
        self.say = tell or (lambda text: say(f"{utc_now_text()} {name}: {text}"))
        self._step_tokens = self.tokens = 0
        self.tokens_per_s = self.blocked_s = self.step_s = self.busy_s = 0.0
        self._stepped_s = monotonic_s()

    def began(self, learner: Incarnation) -> None:
        joined, self._stepped_s = learner.joined, monotonic_s()
        moments = "new"
        if learner.moments_lost:
            moments = "lost, warming up anew" if joined.data_start > 0 else "none yet, warming up"
        elif learner.run.settings.train.inner.name == "sgd":
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
            self.step_s += seconds
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
        busy_s = self.busy_s or 1.0
        return ({} if self.tokens else {"note": f"in its first step: {passed:.0%} of the batch"}) | {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "mean_tokens_per_s": round(self.tokens / busy_s, 1),
            "blocked_percent": round(100 * self.blocked_s / busy_s, 3),
            "last_step_s": round(monotonic_s() - self._stepped_s, 1),
            "data_percent": None if data_s is None or not self.step_s else self._percent(data_s),
        }

    def _percent(self, data_s: float) -> float:
        """Of the steps' time; of one that has not ended only the wait is known."""
        return round(min(100.0, 100 * data_s / self.step_s), 3)
