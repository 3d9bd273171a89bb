"""What a learner tells those that look on while it works: facts for heartbeats, timing, the accounts of a simulation.
Nothing that the learner does depends on what they make of it."""

from __future__ import annotations

from typing import Protocol

from diloco_cli.protocol.actors.joining import Joined
from diloco_cli.protocol.actors.offer_draft import OfferDraft
from diloco_cli.protocol.actors.ports import Wire
from diloco_cli.protocol.actors.progress import Progress
from diloco_cli.protocol.actors.saves import Saves
from diloco_cli.protocol.actors.stopwatch import Phase, Stopwatch
from diloco_cli.protocol.log.records import FragmentVersion, Offer, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.states import LearnerState


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
