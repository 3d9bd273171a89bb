"""What a learner tells those that look on while it works: facts for heartbeats, timing, the accounts of a simulation.
Nothing that the learner does depends on what they make of it.

`Stopwatch`: how long a learner's own doings take, on its own clock. Its offers state it, and its aim reckons with it.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Literal, Protocol

from diloco_cli.protocol.actors.decisions import OfferDraft
from diloco_cli.protocol.actors.joining import Joined, Saves
from diloco_cli.protocol.actors.ports import Wire
from diloco_cli.protocol.actors.progress import Progress
from diloco_cli.protocol.log.records import FragmentVersion, Offer, RunFormat, Timings
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.states import LearnerState
from diloco_cli.protocol.rules.quorum import moving_average

Phase = Literal["hear", "step", "offer", "wait", "save"]
STEPS_SEEN = 33  # their median: H_i follows it, and neither a pause nor a hiccup in one of them says how fast they are


class Stopwatch:
    """Each figure is written by one thread alone. `step_s`: from one step to the next, with what the loop does between
    them, without waiting. `slot_s`: before the first step, as planned."""

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
        """From a commit's appearance to the adoption of what it brings."""
        self.adoption_s = moving_average(self.adoption_s or None, seconds)

    def timings(self, local_steps: float, num_fragments: int) -> Timings:
        return Timings(self.step_s, self.expected_slot_s(local_steps, num_fragments), self.upload_s, self.adoption_s)

    def expected_slot_s(self, local_steps: float, num_fragments: int) -> float:
        """Between two of its slots, by what its steps take: after any pause the log is heard soon."""
        return self.step_s * local_steps / num_fragments if self.step_s else self.slot_s


class Incarnation(Protocol):
    """What others see of a learner: its follower, which works beside the loop, and observers."""

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
    """Hears everything and does nothing."""

    def began(self, learner: Incarnation) -> None:
        """Everything is loaded; the first step comes next."""

    def took(self, phase: Phase, seconds: float) -> None: ...

    def stepped(self, position: int, tokens: int) -> None:
        """On the batch that begins at `position`."""

    def sent(self, draft: OfferDraft) -> None: ...

    def published(self, offer: Offer, data: bytes) -> None:
        """The store has the offer; `data` are its bytes."""

    def adopted(self, output: FragmentVersion, since: OfferDraft | None) -> None:
        """`since`: the send after which own progress was kept, see Progress.kept_since."""

    def gave_up(self, fragment: int, reason: str) -> None:
        """All progress on the fragment up to now that is in no merge."""

    def rolled_back(self, learner: Incarnation, to: int) -> None: ...

    def missed(self, text: str) -> None:
        """What cannot be read, and is waited for."""
