"""What an independent reader of the bucket notes: versions of fragments, and offers that merges have applied,
and how long their deltas were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

FULL, EMPTY = 0.5, 1 / 64  # of the others' length, above which a delta weighs in full; what one of none weighs


@dataclass
class Version:
    """A version of a fragment by this reader's own reckoning."""

    number: int
    parameter: int
    momentum: int
    state_key: str
    weights_key: str
    weights_digest: str


@dataclass(frozen=True)
class AppliedOffer:
    """A range of a learner's data that a merge applied to a fragment, and the key that its offer is signed with."""

    learner: str
    incarnation: int
    fragment: int
    start: int
    end: int
    public: str = ""


@dataclass
class Lengths:
    """Of each fragment the greatest norm by the square root of a step that the merged deltas of honest learners had: so
    long at most is what a delta is compared with, for its steps, while most are honest."""

    greatest: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def note(self, fragment: int, honest: Iterable[dict[str, Any]]) -> None:
        found = [item["norm"] / sqrt(item["steps"]) for item in honest]
        self.greatest[fragment] = max([self.greatest[fragment], *found])

    def least_share(self, fragment: int, item: dict[str, Any]) -> float:
        """What an honest delta keeps of its weight at least."""
        others = self.greatest[fragment] * sqrt(item["steps"])
        return 1.0 if item["norm"] >= FULL * others else max(EMPTY, item["norm"] / (FULL * others))
