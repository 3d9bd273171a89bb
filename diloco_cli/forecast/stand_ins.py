"""What stands in for a real run in virtual time: arithmetic without numbers, training that only takes time, links.

Nothing is trained. Transfers take the time of the payloads' true sizes; the simulated bucket holds only their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

from diloco_cli.config.settings import Link
from diloco_cli.digests import digest
from diloco_cli.methods import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from diloco_cli.protocol.actors.learner import Learner, Moments, Observer, Phase, Progression, Stepped, Values
from diloco_cli.protocol.actors.merging import Merged, Weighed
from diloco_cli.protocol.log.keys import read_delta_key, read_inner_key, read_version_key
from diloco_cli.protocol.log.operations import Create, Get, Operation, Sleep, Steps
from diloco_cli.protocol.log.records import (
    MAX_RECORD_BYTES,
    FragmentVersion,
    Island,
    Mixing,
    Offer,
    OfferId,
    RunFormat,
    fragment_of_slot,
)
from diloco_cli.store.port import Store


@dataclass(frozen=True)
class UsualDelta:
    """Implements protocol.actors.merging.LoadedDelta: as long as any delta of its steps."""

    payload: bytes
    norm: float


class TraceArithmetic:
    """Implements protocol.actors.merging.Arithmetic. `refuse` may give the reason for refusing an offer's payload."""

    def __init__(self, num_fragments: int, refuse: Callable[[Offer], str | None] = lambda offer: None) -> None:
        self._num_fragments, self._refuse = num_fragments, refuse
        self._current: dict[int, bytes] = {}
        self._candidate: dict[int, bytes] = {}

    def initial(self) -> list[Merged]:
        return [self._version(fragment, b"initial") for fragment in range(self._num_fragments)]

    def _version(self, fragment: int, made_from: bytes) -> Merged:
        name = digest(b"%d/" % fragment + made_from).encode()
        self._candidate[fragment] = b"state " + name
        return Merged(self._candidate[fragment], b"weights " + name)

    def holds(self, fragment: int, state_digest: str) -> bool:
        self.settle(fragment, state_digest)
        return fragment in self._current and digest(self._current[fragment]) == state_digest

    def restore(self, fragment: int, state_digest: str, state: bytes) -> None:
        self._current[fragment] = state

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> Any | str:
        return self._refuse(offer) or UsualDelta(payload, sqrt(offer.steps))

    def merge(self, slot: int, deltas: list[Weighed]) -> Merged:
        fragment = fragment_of_slot(slot, self._num_fragments)
        inputs = b";".join(b"%s*%r" % (delta.payload, weight) for delta, weight, _, _ in deltas)
        merged = self._version(fragment, self._current[fragment] + inputs)
        return replace(merged, cosines=(float(len(deltas) > 1),) * len(deltas))

    def settled(self, fragment: int) -> Merged:
        state = self._current[fragment]
        return Merged(state, b"weights " + state.removeprefix(b"state "))

    def settle(self, fragment: int, state_digest: str) -> None:
        if fragment in self._candidate and digest(self._candidate[fragment]) == state_digest:
            self._current[fragment] = self._candidate.pop(fragment)


BITS = 8.0


@dataclass(frozen=True)
class Sizes:
    """Bytes on the wire: of each fragment's delta and weights, of the inner optimizer's moments, and of each fragment's
    state, which only the syncer writes and reads (empty: not simulated)."""

    delta: tuple[float, ...]
    weights: tuple[float, ...]
    moments: float
    state: tuple[float, ...] = ()


def sizes_of(run: RunFormat, bits_of: dict[str, float]) -> Sizes:
    """`bits_of`: per parameter, scales included, by codec."""
    sync, parameters = run.settings.sync, [fragment.num_parameters for fragment in run.layout.fragments]
    hidden = sum(fragment.num_parameters for fragment in run.layout.fragments if not fragment.embedding)
    inner = INNER_OPTIMIZERS[run.settings.train.inner.name]
    return Sizes(
        delta=tuple(n * bits_of[sync.codec] / BITS for n in parameters),
        weights=tuple(n * bits_of[sync.weights_codec] / BITS for n in parameters),
        moments=inner.state_bytes(hidden / sum(parameters)) * sum(parameters),
        state=tuple(float(n * OUTER_OPTIMIZERS[run.settings.outer.name].state_bytes) for n in parameters),
    )


SAME_S = 1e-9


@dataclass
class SharedWire:
    """An island's uplink: the objects on it have equal shares, as an offer and saved moments over a connection each."""

    bps: float
    left_bits: dict[str, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    at_s: float = 0.0

    def begin(self, key: str, num_bytes: float, now_s: float) -> None:
        self.pass_to(now_s)
        self.left_bits[key] = num_bytes * BITS

    def ends_s(self, key: str, now_s: float) -> float:
        """When this object is through, if nothing else comes."""
        self.pass_to(now_s)
        if key not in self.left_bits:
            return self.ended_s[key]
        own = self.left_bits[key]
        return self.at_s + sum(min(own, other) for other in self.left_bits.values()) / self.bps

    def __contains__(self, key: str) -> bool:
        return key in self.left_bits or key in self.ended_s

    def end(self, key: str) -> None:
        self.left_bits.pop(key, None)
        self.ended_s.pop(key, None)

    def pass_to(self, now_s: float) -> None:
        while self.left_bits:
            key = min(self.left_bits, key=self.left_bits.__getitem__)
            shares, least = len(self.left_bits), self.left_bits[key]
            bits = min(least, (now_s - self.at_s) * self.bps / shares)
            self.left_bits = {other: left - bits for other, left in self.left_bits.items()}
            if bits < least:
                break
            self.at_s += bits * shares / self.bps
            del self.left_bits[key]
            self.ended_s[key] = self.at_s
        self.at_s = now_s


@dataclass
class SizesWire:
    """One direction of a link: transfers follow each other."""

    bps: float | None
    free_s: float = 0.0

    def done_s(self, now_s: float, num_bytes: float, slow: float) -> float:
        """When a transfer that is asked for now has ended; an unknown rate costs nothing."""
        seconds = num_bytes * BITS / self.bps * slow if self.bps else 0.0
        self.free_s = max(self.free_s, now_s) + seconds
        return self.free_s


@dataclass
class Condition:
    """The condition of an island across its incarnations: what faults change, and what is measured. An unknown rate
    of its link costs nothing."""

    island: Island
    sizes: Sizes
    slow: float = 1.0  # factor by which its link is slower
    corrupt: int = 0  # how many of its next payloads get a wrong byte
    poison: int = 0  # how many of its next deltas are far too large
    tokens: int = 0
    stalled_s: float = 0.0
    down_s: float = 0.0
    incarnations: int = 0
    up_bytes: float = 0.0
    down_bytes: float = 0.0
    poisoned: set[OfferId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.connect()

    def connect(self) -> None:
        """A process begins with a link that is free."""
        link = self.island.link
        self.up = SharedWire(link.up_bps / self.slow) if link.up_bps else None
        self.down = SizesWire(link.down_bps)

    def become(self, slower: float, now_s: float) -> None:
        """Its link becomes slower by this factor."""
        self.slow *= slower
        if self.up is not None:
            self.up.pass_to(now_s)
            self.up.bps /= slower

    def transfer_s(self, operation: Operation, now_s: float) -> float:
        """How long the payload of this call is on the island's link, as far as is known when it is sent."""
        match operation:
            case Create(key, payload) if key.startswith("delta/") and payload:
                return self._sent_s(key, self.sizes.delta[fragment_of(payload)], now_s)
            case Create(key, _) if key.startswith("inner/"):
                return self._sent_s(key, self.sizes.moments, now_s)
            case Get(key, _) if (version := read_version_key(key)) is not None:
                return self._received_s(self.sizes.weights[version[0]], now_s)
            case Get(key, _) if read_inner_key(key) is not None:
                return self._received_s(self.sizes.moments, now_s)
        return 0.0

    def _sent_s(self, key: str, num_bytes: float, now_s: float) -> float:
        self.up_bytes += num_bytes
        if self.up is None:
            return 0.0
        self.up.begin(key, num_bytes, now_s)
        return self.up.ends_s(key, now_s) - now_s

    def held_until_s(self, operation: Operation, call_s: float, now_s: float) -> float:
        """When a call that is due has its payload through, and its round trip: what was sent later had its share."""
        if self.up is None or not isinstance(operation, Create) or operation.key not in self.up:
            return now_s
        done_s = self.up.ends_s(operation.key, now_s) + call_s
        if done_s > now_s + SAME_S:
            return done_s
        self.up.end(operation.key)
        return now_s

    def _received_s(self, num_bytes: float, now_s: float) -> float:
        self.down_bytes += num_bytes
        return self.down.done_s(now_s, num_bytes, self.slow) - now_s


def fragment_of(payload: bytes) -> int:
    """A payload of this simulation names its fragment."""
    return int(payload.partition(b":")[0])


class VirtualTraining:
    """Implements protocol.actors.learner.Training: only time passes."""

    def __init__(self, condition: Condition) -> None:
        self.condition, self.optimizer_steps = condition, 0

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        yield Sleep(self.condition.island.step_s)
        return self.stepped(batch_tokens)

    def stepped(self, tokens: int) -> Stepped:
        self.optimizer_steps += 1
        self.condition.tokens += tokens
        return Stepped(tokens)

    def read(self, fragment: int) -> Values:
        return None

    def write(self, fragment: int, values: Values) -> None: ...

    def save(self) -> Moments | None:
        step = self.optimizer_steps
        return Moments(step, lambda: b"%d" % step) if self.condition.sizes.moments else None

    def restore(self, moments: bytes) -> bool:
        self.optimizer_steps = int(moments)
        return True

    def reset(self) -> bool:
        return self.condition.sizes.moments > 0


class NamedPayloads:
    """Implements protocol.actors.learner.Wire."""

    def __init__(self, name: str) -> None:
        self._name = name

    def encode(self, fragment: int, seq: int, applied: int | None, base: Values, values: Values) -> bytes:
        return f"{fragment}:{self._name}/{seq}".encode()

    def decode(self, output: FragmentVersion, data: bytes) -> Values:
        return None

    def mix(
        self,
        fragment: int,
        mixing: Mixing,
        merged: Values,
        own: Values,
        reference: Values | None,
        last: bool = False,
    ) -> Values:
        return None


class VirtualLearner(Learner):
    """The product's learner; its island's condition may damage its payloads, and records how long it waits."""

    def __init__(self, condition: Condition, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.condition = condition

    def _publish(self, offer: Offer, payload: bytes) -> Steps[bytes]:
        condition = self.condition
        if condition.poison:
            condition.poison -= 1
            condition.poisoned.add(offer.id)
        if condition.corrupt:
            condition.corrupt -= 1
            offer = replace(offer, payload_digest=digest(payload + b"?"))
        return (yield from super()._publish(offer, payload))


class Stalls(Observer):
    """Records how long an island stands still: at the drift bound, or waiting for a merge."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition

    def began(self, learner: Learner) -> None:
        self._condition.incarnations += 1

    def took(self, phase: Phase, seconds: float) -> None:
        if phase == "wait":
            self._condition.stalled_s += seconds


@dataclass
class SyncerSide:
    """`latency_s` of each call; `merge_s`: of the arithmetic of one merge, before its state is written."""

    sizes: Sizes
    store: Store
    latency_s: float
    merge_s: float
    link: Link

    def __post_init__(self) -> None:
        self.up, self.down = SizesWire(self.link.up_bps), SizesWire(self.link.down_bps)

    def call_s(self, operation: Operation, now_s: float, merging: bool) -> float:
        """`merging`: not before the first commit, whose versions no arithmetic makes."""
        match operation:
            case Create(key, _):
                begins_s = now_s + (self.merge_s if merging and key.startswith("state/") else 0.0)
                return self.latency_s + self.up.done_s(begins_s, self._version_bytes(key), 1.0) - now_s
            case Get(key, _):
                num_bytes = self._version_bytes(key) or self._delta_bytes(key)
                return self.latency_s + self.down.done_s(now_s, num_bytes, 1.0) - now_s
        return self.latency_s

    def _version_bytes(self, key: str) -> float:
        version = read_version_key(key)
        if version is None:
            return 0.0
        sizes = self.sizes.state if key.startswith("state/") else self.sizes.weights
        return sizes[version[0]] if sizes else 0.0

    def _delta_bytes(self, key: str) -> float:
        payload = self.store.get(key, MAX_RECORD_BYTES) if read_delta_key(key) is not None else None
        return 0.0 if not payload else self.sizes.delta[fragment_of(payload)]
