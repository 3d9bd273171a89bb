"""What a learner tells those that look on while it works: facts for heartbeats, timing, the accounts of a simulation.
Nothing that the learner does depends on what they make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from diloco_cli.protocol.log.records import FragmentVersion, Offer

if TYPE_CHECKING:
    from diloco_cli.protocol.actors.learner import Learner
    from diloco_cli.protocol.actors.offer_draft import OfferDraft

Phase = Literal["hear", "step", "offer", "wait", "save"]


class Observer:
    """Hears everything and does nothing."""

    def began(self, learner: Learner) -> None:
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

    def rolled_back(self, learner: Learner, to: int) -> None: ...

    def missed(self, text: str) -> None:
        """What cannot be read, and is waited for."""
