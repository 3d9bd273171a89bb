"""Why a learner works and is never merged: its refusals of late, summed up in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from diloco_cli.protocol.log.metrics import REFUSED, Note
from diloco_cli.protocol.rules.eligibility import REASONS

TOLD = 2  # reasons
NOT_GENUINE = "its heartbeats and offers are not signed by it, or with a key that is revoked: diloco key request"


def refusals_of(notes: Iterable[Note], learner: str) -> str:
    """The most frequent reasons first; "" without any."""
    counts: Counter[str] = Counter()
    for note in notes:
        if (note.kind, note.unit) == (REFUSED, learner):
            counts[note.text] += note.count
    return "; ".join(
        f"{count} refused: {reason}" + (f" ({REASONS[reason]})" if reason in REASONS else "")
        for reason, count in counts.most_common(TOLD)
    )
