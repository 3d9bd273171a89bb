"""What a syncer needs beside a store and a clock: arithmetic and evaluation, real or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from diloco_cli.protocol.records import Offer, Output


@dataclass(frozen=True)
class Merged:
    """A fragment's new version as bytes: the state that syncers read, and the cast that learners adopt.

    `agreement`: the mean cosine between the merged deltas, None for one learner or where nobody asked for it.
    `scales`: what each delta was multiplied by (norm clip), in their order; empty if none was."""

    state: bytes
    cast: bytes
    agreement: float | None = None
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A merge that gave no version: which of its deltas must go, by their place in the list, and why. The others may be
    merged without them."""

    reasons: dict[int, str]


class Arithmetic(Protocol):
    """The numerical work. Deterministic: the same inputs in the same order give the same bytes."""

    def initial(self) -> list[Merged]:
        """Every fragment's first version."""
        ...

    def holds(self, fragment: int, state_digest: str) -> bool:
        """Whether this version's parameters and momentum are in memory."""
        ...

    def restore(self, fragment: int, state_digest: str, state: bytes) -> None: ...

    def read_delta(self, offer: Offer, payload: bytes, decoded_base: bytes | None) -> Any | str:
        """A delta ready to merge, re-anchored if the base's cast is given; or the reason of its refusal."""
        ...

    def merge(self, fragment: int, deltas: list[tuple[Any, float]]) -> Merged | Refused:
        """The next version from (delta, weight) pairs; or which of them turned out to be unfit only now."""
        ...

    def settled(self, fragment: int) -> Merged:
        """The version in memory, as the bytes that were published."""
        ...

    def settle(self, fragment: int, state_digest: str) -> None:
        """The log says that this is the fragment's version now."""
        ...


class Evaluator(Protocol):
    """Evaluates the outer parameters somewhere else, without ever delaying a merge."""

    def submit(self, n: int, outputs: tuple[Output, ...], final: bool) -> bool:
        """Start an evaluation as of commit n; False if one is still under way."""
        ...

    def result(self) -> tuple[int, float | None] | None:
        """A finished evaluation: (n, loss in nats per token), the loss None if it failed."""
        ...
