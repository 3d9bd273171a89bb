"""The product's learner with a model of one integer a fragment (ports.py), and a witness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.protocol.actors import learner as product
from diloco_cli.protocol.actors.learner import PAUSE_S
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import Offer, ProcessClaim, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.virtual.world import VirtualLanes
from tests.histories.ports import IntegerTraining, IntegerWire, LearnerProfile
from tests.histories.witness import Beliefs, Witness

DRAIN_S = 10.0  # at most: if a whole quorum leaves at once, each learner would wait for the others' progress


class SimulatedLearner(product.Learner):
    """One process. `start_threads` starts actors that live and die with it."""

    def __init__(
        self, run: RunFormat, name: str, claim: ProcessClaim, nonce: Callable[[], str], seen: Beliefs,
        profile: LearnerProfile, start_threads: Callable[[list[Steps[Any]]], None],
    ) -> None:  # fmt: skip
        self.profile, self._waits = profile, count()
        wire = IntegerWire(profile, run.settings.sync.error_feedback)
        lanes = VirtualLanes(lambda steps: start_threads([steps]))
        self.weights, self.witness = wire.weights, Witness(self, seen)
        self.integers = IntegerTraining(name, run.num_fragments, profile, lambda: self.state.n)
        super().__init__(
            run, name, claim, self.integers, wire, nonce, lanes.start, self.witness,
            lambda: self.profile.leaves(),  # noqa: PLW0108 (profile change)
            lambda: next(self._waits) < DRAIN_S / PAUSE_S,
        )  # fmt: skip

    def train(self) -> Steps[RunState]:
        state = yield from super().train()
        self.witness.left()
        return state

    def _publish(self, offer: Offer, payload: bytes) -> Steps[bytes]:
        if payload and self.profile.corrupts():
            offer = replace(offer, payload_digest=digest(payload + b"?"))
        elif payload and self.profile.harms():
            self.witness.seen.harmful.add(offer.id)
        return (yield from super()._publish(offer, payload))
