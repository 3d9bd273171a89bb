"""Which offers of a log were applied, and which refused, in a byte each: a run of a month has millions."""

from __future__ import annotations

from collections import defaultdict

APPLIED, REFUSED = 1, 2
MOST_SKIPPED = 1 << 16  # numbers of one incarnation's offers follow each other; others are kept one by one


class SettledOffers:
    """By learner, incarnation and number. An offer may be both, where a log is wrong."""

    def __init__(self) -> None:
        self._dense: dict[tuple[str, int], bytearray] = defaultdict(bytearray)
        self._strewn: dict[tuple[str, int, int], int] = {}

    def outcome(self, learner: str, incarnation: int, seq: int) -> int:
        """The sum of APPLIED and REFUSED; 0 for an offer that has no outcome."""
        dense = self._dense.get((learner, incarnation), b"")
        return dense[seq] if 0 <= seq < len(dense) else self._strewn.get((learner, incarnation, seq), 0)

    def settle(self, learner: str, incarnation: int, seq: int, outcome: int) -> None:
        dense = self._dense[learner, incarnation]
        if not 0 <= seq <= len(dense) + MOST_SKIPPED or (learner, incarnation, seq) in self._strewn:
            offer_id = (learner, incarnation, seq)
            self._strewn[offer_id] = self._strewn.get(offer_id, 0) | outcome
            return
        if seq >= len(dense):
            dense.extend(bytes(seq + 1 - len(dense)))
        dense[seq] |= outcome
