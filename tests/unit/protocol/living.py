"""A learner in virtual time, whose log the test writes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from diloco_cli.protocol.actors.learner import Learner, Observer
from diloco_cli.protocol.actors.progress import OfferDraft
from diloco_cli.protocol.log.keys import offer_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import FragmentVersion, Offer, ProcessClaim, RunFormat, decode
from diloco_cli.store.memory import MemoryStore
from diloco_cli.virtual.world import VirtualLanes, World
from tests.unit.protocol.integer_ports import UnitTraining, UnitWire, WrittenLog


class Seen(Observer):
    """What a learner told."""

    def __init__(self) -> None:
        self.begun = False
        self.adoptions: list[tuple[int, int]] = []
        self.given_up: list[tuple[int, str]] = []
        self.missing: list[str] = []
        self.back_to: list[int] = []

    def began(self, learner: Learner) -> None:
        self.begun = True

    def adopted(self, output: FragmentVersion, since: OfferDraft | None) -> None:
        self.adoptions.append((output.fragment, output.version))

    def gave_up(self, fragment: int, reason: str) -> None:
        self.given_up.append((fragment, reason))

    def rolled_back(self, learner: Learner, to: int) -> None:
        self.back_to.append(to)

    def missed(self, text: str) -> None:
        self.missing.append(text)


class Living:
    """One incarnation of `l0`, begun as the test begins."""

    def __init__(
        self, log: WrittenLog, training: UnitTraining | None = None, leaves: Callable[[], bool] = lambda: False,
        may_drain: Callable[[], bool] = lambda: False, nonce: str = "a", begins: bool = True,
    ) -> None:  # fmt: skip
        """`begins`: at once, for all that it needs is there."""
        self.log, self.world, self.seen = log, World(store=log.store), Seen()
        self.training = training or UnitTraining(log.run.num_fragments)
        numbers = count()
        lanes = VirtualLanes(lambda steps: self.world.start("l0", steps))
        self.learner = Learner(
            log.run, "l0", ProcessClaim(0, nonce, "test", 1, "then", "test"), self.training, UnitWire(),
            lambda: f"{nonce}{next(numbers)}", lanes.start, self.seen, leaves, may_drain,
        )  # fmt: skip
        self.actor = self.world.start("l0", self.learner.train())
        if begins:
            self.until(lambda: self.seen.begun)

    @property
    def run(self) -> RunFormat:
        return self.log.run

    @property
    def store(self) -> MemoryStore:
        return self.log.store

    def perform(self, steps: Steps[object]) -> object:
        """Beside it."""
        actor = self.world.start("test", steps)
        assert self.world.run(lambda: actor.ended, 60.0) and actor.error is None, actor.error
        return actor.result

    def until(self, holds: Callable[[], object], within_s: float = 60.0) -> None:
        assert self.world.run(lambda: bool(holds()) or self.failed(), within_s), "it does not come to that"
        if self.actor.error is not None:
            raise self.actor.error

    def failed(self) -> bool:
        return self.actor.error is not None

    def offers(self, incarnation: int = 1) -> list[Offer]:
        """What it has published."""
        found: list[Offer] = []
        while (data := self.store.get(offer_key("l0", incarnation, len(found)))) is not None:
            found.append(decode(Offer, data, "offer"))
        return found
