"""The product's learner with a model of one integer a fragment, and a witness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.protocol.actors import learner as product
from diloco_cli.protocol.actors.learner import PAUSE_S, Moments, Progression, Stepped
from diloco_cli.protocol.log.operations import Sleep, Steps
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, Offer, ProcessClaim, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.virtual.world import VirtualLanes
from tests.histories.integers import delta_bytes, gradient, numbers, rounded
from tests.histories.moments import FRESH, moments_bytes, read_moments
from tests.histories.witness import Beliefs, Witness


@dataclass
class LearnerProfile:
    """The properties of one learner: its step's time, when it leaves (after a drain of some seconds), the bad payload
    that it sends in place of a delta (None: the delta), whether its payload has other bytes than its offer names,
    whether its delta does harm, the share of its batch that a step takes (below 1 while a part of the island is
    missing), and how many times as long as it should be its delta is."""

    step_s: float = 0.05
    leaves: Callable[[], bool] = lambda: False
    poison: Callable[[], int | str | None] = lambda: None
    corrupts: Callable[[], bool] = lambda: False
    harms: Callable[[], bool] = lambda: False
    share: Callable[[], float] = lambda: 1.0
    lengthens: Callable[[], float] = lambda: 1.0


class IntegerTraining:
    """The training port: a step takes its time and moves every fragment by its data's gradient.
    `optimizer_steps`: steps of its moments, `saved_at` of them when they were last saved; `restored`: the moments that
    it restored, None: none. `head`: the newest commit that the learner knows."""

    def __init__(self, name: str, num_fragments: int, profile: LearnerProfile, head: Callable[[], int] = int) -> None:
        self.name, self.profile, self.head = name, profile, head
        self.values = [0] * num_fragments
        self.optimizer_steps = self.saved_at = 0
        self.restored: bytes | None = None

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        yield Sleep(self.profile.step_s)
        tokens = max(1, round(batch_tokens * self.profile.share()))
        moved = gradient(self.name, position, position + tokens)
        self.values = [value - moved for value in self.values]
        self.optimizer_steps += 1
        return Stepped(tokens)

    def read(self, fragment: int) -> int:
        return self.values[fragment]

    def write(self, fragment: int, values: int) -> None:
        self.values[fragment] = values

    def save(self) -> Moments | None:
        step, n = self.optimizer_steps, self.head()
        self.saved_at = step
        return Moments(step, lambda: moments_bytes(step, n))

    def restore(self, moments: bytes) -> bool:
        self.optimizer_steps = self.saved_at = read_moments(moments)[0]
        self.restored = moments
        return True

    def reset(self) -> bool:
        self.optimizer_steps = self.saved_at = 0
        self.restored = None
        return True

    @property
    def as_of(self) -> int:
        """The commit as of which the restored moments were saved."""
        return FRESH if self.restored is None else read_moments(self.restored)[1]


class IntegerWire:
    """Implements protocol.actors.learner.Wire. `weights`: the bytes of versions that were decoded and not adopted yet;
    `left`: the rounding error of each offer, by fragment and seq."""

    def __init__(self, profile: LearnerProfile, feeds_back: bool) -> None:
        self.profile, self.feeds_back = profile, feeds_back
        self.weights: dict[FragmentVersion, bytes] = {}
        self.left: dict[tuple[int, int | None], int] = {}

    def encode(self, fragment: int, seq: int, applied: int | None, base: int, values: int) -> bytes:
        poison, delta = self.profile.poison(), base - values
        if self.feeds_back:
            wanted = delta + self.left.get((fragment, applied), 0)
            delta = rounded(wanted)
            self.left[fragment, seq] = wanted - delta
        factor = self.profile.lengthens()
        delta = delta if factor == 1.0 else int(delta * factor)
        return delta_bytes(delta if poison is None else poison)

    def decode(self, output: FragmentVersion, data: bytes) -> int:
        self.weights[output] = data
        (value,) = numbers(data, "weights")
        return value

    def mix(
        self, fragment: int, mixing: Mixing, merged: int, own: int, reference: int | None, last: bool = False
    ) -> int:
        """A blend of integers is the merged one, because own progress counts from there in any case."""
        return merged if reference is None else merged + (own - reference)


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
