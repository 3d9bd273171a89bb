"""Learners that wait for each merge, as (Streaming) DiLoCo has it: the product's, but for when they offer and adopt."""

from __future__ import annotations

from collections import deque
from typing import Any

from diloco_cli.protocol.actors.learner import PAUSE_S, Learner
from diloco_cli.protocol.actors.progress import OfferDraft, Progress
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.state import LearnerState, RunState
from diloco_cli.protocol.rules.aim import Aim


class StepAim(Aim):
    """Offers go by own steps alone: neither a clock nor a late offer decides anything."""

    def _is_due(self, slot: int, now_s: float, step_s: float) -> bool:
        return self.reached - slot >= 1 - 1e-6


class LockstepProgress(Progress):
    """H steps a round for everybody, and an offer for every slot, however late it is."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.aim = StepAim(self.aim.num_fragments, self.aim.head, "planned", closes=False)

    def heard(self, state: RunState, own_step_s: float = 0.0) -> bool:
        return super().heard(state)


class StreamingLearner(Learner):
    """Adopts each merge exactly `sync.overlap` slots after its slot, and waits for it if it is not here yet. For
    runs in which every offer is merged in its slot: quorum M, no failures."""

    progress_type = LockstepProgress

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        overlap = self.run.settings.sync.overlap
        assert overlap != "auto"
        self.overlap, self.awaited = overlap, deque[OfferDraft]()

    def _adopts_at_once(self, fragment: int) -> bool:
        return False

    def _send(self, draft: OfferDraft) -> None:
        super()._send(draft)
        self.awaited.append(draft)

    def adopt(self) -> Steps[None]:
        while self.awaited and self.awaited[0].slot + 1 + self.overlap <= self.progress.aim.next_slot:
            draft = self.awaited.popleft()
            while not self.is_leaving and not self._has(draft):
                self.go(LearnerState.WAITING)
                yield Sleep(PAUSE_S)
                yield from self.hear()
            if self._has(draft):
                self._adopt(*self.arrived.pop(draft.fragment), (yield Now()))
        self.go(LearnerState.TRAINING)

    def _has(self, draft: OfferDraft) -> bool:
        version = self.arrived.get(draft.fragment)
        return version is not None and version[0].slot >= draft.slot
