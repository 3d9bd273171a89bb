"""What a syncer must have multiplied each delta by: the norm cap and the clip, recomputed by a verifier.

A syncer compares with what it has merged since it began to serve, so its memory is all in the log (the epochs, the
merges, the refusals) and in the payloads. What cannot be known is passed over, never guessed:

    behind the log's floor   payloads are gone; until 31 newer norms of the fragment, or the next epoch, fill the memory
    damaged payloads         likewise
    three refusals in a row  the memory is forgotten at the third; the log does not tell which of the slot's other
                             deltas were read before, so both scales pass for them

Norms are sums whose last bits differ between machines, so scales are compared to one part in a million; the merge is
then recomputed with the very scale that the log gives, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isclose
from typing import Literal

import numpy as np

from diloco_cli.algorithm.merge import Source
from diloco_cli.protocol.records import Commit, Input
from diloco_cli.syncer.norms import CAP, FEWEST, MEMORY, PATIENCE, median_of, scale_of

TOLERANCE = 1e-6


class ScaleBooks:
    """Of one log, fed commit by commit."""

    def __init__(self, clip: float | Literal["none"]) -> None:
        self.clip = clip
        self._accepted: dict[int, deque[float | None]] = {}
        self._refused_in_a_row: dict[int, int] = {}

    def note(self, commit: Commit) -> None:
        """Before its inputs are checked: who begins to serve remembers nothing; what was refused came before a merge
        that says so."""
        if commit.kind == "epoch_start":
            self._accepted, self._refused_in_a_row = {}, {}
        for fate in commit.fates:
            if fate.reason == "norm_cap":
                self._refused_in_a_row[fate.fragment] = self._refused_in_a_row.get(fate.fragment, 0) + 1

    def merged(self, fragment: int, inputs: Sequence[Input], sources: Sequence[Source | None]) -> list[str]:
        """What is wrong with the scales of one merge; its norms enter the books. None: a delta that is not there."""
        norms = [None if source is None else float(np.linalg.norm(source.norms)) for source in sources]
        known = [(item, norm) for item, norm in zip(inputs, norms, strict=True) if norm is not None]
        medians = self._possible_medians(fragment)
        wrong = [self._wrong(item, norm, medians) for item, norm in known] if medians else []
        memory = self._accepted.setdefault(fragment, deque(maxlen=MEMORY))
        if self._refused_in_a_row.pop(fragment, 0) >= PATIENCE:
            memory.clear()
        memory.extend(None if norm is None else item.scale * norm for item, norm in zip(inputs, norms, strict=True))
        return [text for text in wrong if text]

    def _possible_medians(self, fragment: int) -> list[float | None]:
        """Of what the syncer remembered; empty if that cannot be known."""
        accepted = self._accepted.get(fragment, deque())
        known = [norm for norm in accepted if norm is not None]
        if len(accepted) >= FEWEST and len(known) < len(accepted):
            return []
        forgotten = self._refused_in_a_row.get(fragment, 0) >= PATIENCE
        return [median_of(known), *([None] if forgotten else [])]

    def _wrong(self, item: Input, norm: float, medians: list[float | None]) -> str:
        possible = [scale_of(norm, median, self.clip) for median in medians]
        near = any(median is not None and isclose(norm, CAP * median, rel_tol=TOLERANCE) for median in medians)
        fits = any(scale is not None and isclose(item.scale, scale, rel_tol=TOLERANCE) for scale in possible)
        if near or fits:
            return ""
        who = f"offer {item.incarnation}/{item.seq} of {item.learner}"
        if possible[0] is None:
            return f"{who} is merged, and is {norm / (medians[0] or norm):.1f} times as long as usual"
        return f"{who} is scaled by {item.scale:g}, where its length gives {possible[0]:g}"
