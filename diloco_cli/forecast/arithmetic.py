"""Arithmetic without numbers: a version is the digest of its inputs, so different inputs give different versions.
Nothing is trained, and the protocol's own code makes all decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.protocol.actors.ports import Merged
from diloco_cli.protocol.log.records import Offer, fragment_of_slot


@dataclass(frozen=True)
class UsualDelta:
    """Implements protocol.actors.ports.LoadedDelta: as long as any delta of its steps."""

    payload: bytes
    norm: float


class TraceArithmetic:
    """Implements protocol.actors.ports.Arithmetic. `refuse` may give the reason for refusing an offer's payload."""

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

    def false_claim(self, fragment: int, delta: Any) -> str | None:
        return None

    def agreements(self, fragment: int, deltas: list[Any], seed: str) -> tuple[float, ...]:
        return ()

    def merge(self, slot: int, deltas: list[tuple[Any, float, float]]) -> Merged:
        fragment = fragment_of_slot(slot, self._num_fragments)
        inputs = b";".join(b"%s*%r" % (delta.payload, weight) for delta, weight, _ in deltas)
        return self._version(fragment, self._current[fragment] + inputs)

    def settled(self, fragment: int) -> Merged:
        state = self._current[fragment]
        return Merged(state, b"weights " + state.removeprefix(b"state "))

    def settle(self, fragment: int, state_digest: str) -> None:
        if fragment in self._candidate and digest(self._candidate[fragment]) == state_digest:
            self._current[fragment] = self._candidate.pop(fragment)
