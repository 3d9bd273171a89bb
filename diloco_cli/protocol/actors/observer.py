"""The events that a learner reports to observers: for heartbeats, timing, the accounts of a simulation. No action of
the learner depends on an observer.

`Stopwatch`: how long a learner's actions take, on its own clock. Its offers state these times, and its aim uses them.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Literal, Protocol

from diloco_cli.protocol.actors.joining import Joined, Saves
from diloco_cli.protocol.actors.ports import Wire
from diloco_cli.protocol.actors.progress import OfferDraft, Progress
from diloco_cli.protocol.log.records import FragmentVersion, Offer, RunFormat, Timings
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.states import LearnerState
from diloco_cli.protocol.rules.quorum import moving_average

Phase = Literal["hear", "step", "offer", "wait", "save"]
STEPS_SEEN = 33  # H_i follows the median of these step times, so that one long step does not change it


class Stopwatch:
    """Each figure is written by one thread alone. `step_s`: a step with the loop's work before it, without waiting.
    `slot_s`: the planned time between slots, used before the first step."""

    def __init__(self) -> None:
        self.step_s = self.upload_s = self.adoption_s = self.slot_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=STEPS_SEEN)
        self._between_s = 0.0

    def took(self, phase: Phase, seconds: float) -> None:
        if phase == "step":
            self._steps_s.append(seconds + self._between_s)
            self._between_s, self.step_s = 0.0, median_low(self._steps_s)
        elif phase != "wait":
            self._between_s += seconds

    def uploaded(self, seconds: float) -> None:
        self.upload_s = moving_average(self.upload_s or None, seconds)

    def adopted(self, seconds: float) -> None:
        """A version was adopted `seconds` after its commit appeared."""
        self.adoption_s = moving_average(self.adoption_s or None, seconds)

    def timings(self, local_steps: float, num_fragments: int) -> Timings:
        return Timings(self.step_s, self.expected_slot_s(local_steps, num_fragments), self.upload_s, self.adoption_s)

    def expected_slot_s(self, local_steps: float, num_fragments: int) -> float:
        """The time between two of the learner's slots by its step time, without pauses: it polls soon after any."""
        return self.step_s * local_steps / num_fragments if self.step_s else self.slot_s


class Incarnation(Protocol):
    """The part of a learner that its follower, which works beside the loop, and observers use."""

    run: RunFormat
    name: str
    wire: Wire
    doing: LearnerState
    joined: Joined
    progress: Progress
    saves: Saves
    watch: Stopwatch
    state: RunState
    loss: float | None
    note: str
    moments_lost: bool

    @property
    def observer(self) -> Observer: ...


class Observer:
    """Receives every event and does nothing."""

    def began(self, learner: Incarnation) -> None:
        """Everything is loaded; the first step comes next."""

    def took(self, phase: Phase, seconds: float) -> None: ...

    def stepped(self, position: int, tokens: int) -> None:
        """A step on the batch that begins at `position` was done."""

    def sent(self, draft: OfferDraft) -> None: ...

    def published(self, offer: Offer, data: bytes) -> None:
        """The store has the offer; `data` are its bytes."""

    def adopted(self, output: FragmentVersion, since: OfferDraft | None) -> None:
        """`since`: the offer since which own progress was kept, see Progress.kept_since."""

    def gave_up(self, fragment: int, reason: str) -> None:
        """The learner has dropped all progress on the fragment that is in no merge."""

    def rolled_back(self, learner: Incarnation, to: int) -> None: ...

    def missed(self, text: str) -> None:
        """`text` says which version cannot be read and is waited for."""
