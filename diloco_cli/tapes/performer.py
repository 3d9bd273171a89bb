"""One incarnation of a learner, performed from its track: the training loop's own steps, without its timing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from diloco_cli.errors import UsageError
from diloco_cli.protocol.actors.fragments import Fragments
from diloco_cli.protocol.actors.ports import Progression
from diloco_cli.protocol.log.records import Mixing, OfferId, TapeEvent
from diloco_cli.protocol.log.tape import Tape, Track
from diloco_cli.protocol.rules.schedule import fraction_of_run
from diloco_cli.tapes.needs import Needs, Save
from diloco_cli.tensors.codecs import Codec, codec
from diloco_cli.training.replica import DeviceTraining, Replica
from diloco_cli.training.wire import TensorWire


@dataclass(frozen=True)
class Sent:
    """An encoded delta on its way to its merge: made from version `base` of `fragment`; `loss` of the step before."""

    fragment: int
    slot: int
    base: int
    payload: bytes
    loss: float


class Versions:
    """The weights of the versions that the replay still needs, decoded when first adopted: [n] float32 each."""

    def __init__(self, tape: Tape, needs: Needs) -> None:
        self._layout, self.uses = tape.run.layout, needs.versions.copy()
        self._codec: Codec = codec(tape.run.settings.sync.weights_codec)
        self.encoded: dict[tuple[int, int], bytes] = {}
        self._decoded: dict[tuple[int, int], torch.Tensor] = {}

    def put(self, fragment: int, version: int, weights: bytes) -> None:
        if self.uses[fragment, version] > 0:
            self.encoded[fragment, version] = weights

    def weights(self, fragment: int, version: int) -> bytes:
        """Raises UsageError if no merge has made it yet: the tape contradicts itself."""
        if (fragment, version) not in self.encoded:
            raise UsageError(
                f"this tape cannot be played: version {version} of fragment {fragment} is used before it is made"
            )
        return self.encoded[fragment, version]

    def values(self, fragment: int, version: int) -> torch.Tensor:
        weights = self.weights(fragment, version)
        if (fragment, version) not in self._decoded:
            size = self._layout.fragments[fragment].num_parameters
            self._decoded[fragment, version] = self._codec.from_bytes(weights, size)
        return self._decoded[fragment, version]

    def used(self, fragment: int, version: int) -> None:
        """One of the version's uses is over."""
        self.uses[fragment, version] -= 1
        if self.uses[fragment, version] <= 0:
            self.encoded.pop((fragment, version), None)
            self._decoded.pop((fragment, version), None)


@dataclass
class TapeWorld:
    """The shared state of one tape's performers. `merge_numbers`, `merged_tokens`: of the merges, in their order."""

    tape: Tape
    needs: Needs
    versions: Versions
    sent: dict[OfferId, Sent] = field(default_factory=dict)
    saved: dict[Save, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.merge_numbers = [merge.n for merge in self.tape.merges]
        self.merged_tokens = [0, *(merge.tokens for merge in self.tape.merges)]

    def merges_until(self, n: int) -> int:
        """How many merges commits 0..n hold."""
        return bisect_right(self.merge_numbers, n)


class Performer:
    """Performs one track, event by event, on the training port and the fragments of the product's learner."""

    def __init__(self, world: TapeWorld, track: Track, replica: Replica, *, begin: bool = True) -> None:
        run, island = world.tape.run, world.tape.run.island(track.learner)
        assert island is not None
        self.world, self.run, self.track, self.replica = world, run, track, replica
        self.training, self.wire = DeviceTraining(run, replica), TensorWire(run)
        self.fragments = Fragments(self.training, self.wire)
        self.threads = max(run.settings.train.threads, island.num_accelerators if island.accelerator == "cpu" else 1)
        self.random_state = torch.random.get_rng_state()
        self.cursor = 0
        self.position, self.steps, self.loss = track.position, 0, float("nan")
        self.local_steps = float(island.local_steps)
        self.merges = world.merges_until(max(track.versions))
        self.steps_since_merge = 0
        self.fraction = 0.0
        self.base_versions = list(track.versions)
        if begin:
            self._begin()

    def _begin(self) -> None:
        """Begin with the versions that the incarnation began with."""
        for fragment, version in enumerate(self.track.versions):
            self.fragments.begin(fragment, self.world.versions.values(fragment, version))
            self.world.versions.used(fragment, version)

    def perform_until(self, reached: Callable[[TapeEvent], bool]) -> None:
        """Go on until the event that `reached` recognises has been performed."""
        with self._own_conditions():
            while self.cursor < len(self.track.events):
                event = self.track.events[self.cursor]
                self.cursor += 1
                self._perform(event)
                if reached(event):
                    return
        raise UsageError(
            f"this tape cannot be played: incarnation {self.track.incarnation} of {self.track.learner} does not come"
            " to what a merge needs of it (a second time, or out of order)"
        )

    @contextmanager
    def _own_conditions(self) -> Iterator[None]:
        """Each process had its own random numbers (dropout) and its own number of threads."""
        torch.set_num_threads(self.threads)
        torch.random.set_rng_state(self.random_state)
        try:
            yield
        finally:
            self.random_state = torch.random.get_rng_state()
            torch.set_num_threads(1)

    def _perform(self, event: TapeEvent) -> None:
        match event.kind:
            case "steps":
                for _ in range(event.count):
                    self._step(event.batch_tokens)
            case "heard":
                self._hear(event)
            case "moved":
                self.position = event.position
            case "adopted":
                self._adopt(event)
            case "dropped":
                self.fragments.go_back(event.fragment)
            case "saved":
                self._save(event)
            case "sent":
                self._send(event)

    def _step(self, batch_tokens: int) -> None:
        settings = self.run.settings
        now = fraction_of_run(
            self.world.merged_tokens[self.merges], settings.train.tokens, self.run.round_tokens,
            self.steps_since_merge, self.local_steps, settings.sync.drift_rounds,
        )  # fmt: skip
        self.fraction = max(self.fraction, now)
        at = Progression(self.fraction, self.steps, self.track.moments_lost)
        self.loss = self.training.train(self.position, batch_tokens, at).loss or 0.0
        self.position += batch_tokens
        self.steps += 1
        self.steps_since_merge += 1

    def _hear(self, event: TapeEvent) -> None:
        merges = self.world.merges_until(event.n)
        if merges > self.merges:
            self.merges, self.steps_since_merge = merges, 0
        self.local_steps = event.local_steps

    def _adopt(self, event: TapeEvent) -> None:
        fragment, mixing = event.fragment, event.mixing or self._mixing_of_the_run()
        merged = self.world.versions.values(fragment, event.version)
        self.fragments.adopt(fragment, merged, mixing, event.since)
        self.base_versions[fragment] = event.version
        self.world.versions.used(fragment, event.version)

    def _mixing_of_the_run(self) -> Mixing:
        mixing = self.run.settings.sync.mixing
        if mixing == "adaptive":
            raise UsageError(
                "this tape cannot be played: with `adaptive` mixing each adoption must say how it was made"
            )
        return mixing

    def _save(self, event: TapeEvent) -> None:
        name: Save = (self.track.learner, self.track.incarnation, event.count)
        if name in self.world.needs.saves:
            moments = self.training.save()
            if moments is None:
                raise UsageError(f"this tape cannot be played: {self.track.learner} saves moments before it has any")
            self.world.saved[name] = moments.encode()

    def _send(self, event: TapeEvent) -> None:
        """Encode the delta if a merge takes it, keep the parameters if a later adoption goes back to them."""
        offer, fragment = (self.track.learner, self.track.incarnation, event.seq), event.fragment
        applied, kept = offer in self.world.needs.applied, offer in self.world.needs.since
        if not applied and not kept:
            return
        values = self.fragments.send(fragment, event.seq, kept)
        if applied:
            payload = self.wire.encode(fragment, event.seq, event.since, self.fragments.bases[fragment], values)
            base = self.base_versions[fragment]
            self.world.sent[offer] = Sent(fragment, event.slot, base, payload, self.loss)
