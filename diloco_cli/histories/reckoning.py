"""What an independent reader of the bucket notes: versions of fragments, and offers that merges have applied."""

from __future__ import annotations

from dataclasses import dataclass


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
