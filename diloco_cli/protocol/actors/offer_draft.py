"""What a learner decided to offer, before there is a payload."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.protocol.log.records import Beginning, Event, FragmentVersion


@dataclass(frozen=True)
class OfferDraft:
    """A decision to offer: fragment `fragment` for slot `slot`, as offer number `seq`. `applied`: the newest own offer
    of the fragment that a merge took, as far as is known."""

    seq: int
    slot: int
    fragment: int
    base: FragmentVersion
    data_start: int
    data_end: int
    steps: int
    began: Beginning | None
    events: tuple[Event, ...]
    applied: int | None
