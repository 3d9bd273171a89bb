"""The norm cap and the norm clip, for a delta longer than its fragment's recent deltas.

Both compare with the running median of the fragment's accepted deltas. The cap refuses a delta far beyond any honest
one; the clip (`sync.clip`) shortens a long delta. The median is in one syncer's memory, so the log records the scale
that a clip applied, and a verifier keeps books of its own (`ScaleBooks`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isclose
from typing import Literal

import numpy as np

from diloco_cli.protocol.log.commits import Commit, EpochStart
from diloco_cli.protocol.log.records import MergedOffer
from diloco_cli.tensors.merge import DeltaSource

CAP = 8.0  # times the running median of a fragment's accepted deltas
MEMORY = 31
FEWEST = 3  # accepted deltas before there is a cap
PATIENCE = 3  # refusals in a row after which the fragment's reference is taken to be out of date
TOLERANCE = 1e-6  # of a verifier


def scale_of(norm: float, median: float | None, clip: float | Literal["none"]) -> float | None:
    """The factor for a delta of this (finite) norm before it is merged, 1 unless it is clipped; None if the delta is
    refused. `median`: of the fragment's accepted norms, None while too few are known."""
    if median is None:
        return 1.0
    if norm > CAP * median:
        return None
    return 1.0 if clip == "none" or norm <= clip * median else clip * median / norm


def median_of(accepted: Sequence[float]) -> float | None:
    return sorted(accepted)[len(accepted) // 2] if len(accepted) >= FEWEST else None


class NormCap:
    """Compares each learner's delta with those that were accepted before it, fragment by fragment.

    A single learner's false deltas are refused as long as deltas of others are accepted in between. If none is
    accepted, honest deltas have changed (another learning rate, a wiped momentum): then the reference is dropped,
    because otherwise the fragment would never merge again.
    """

    def __init__(self, clip: float | Literal["none"] = "none") -> None:
        self.clip = clip
        self._accepted: dict[int, deque[float]] = {}
        self._refused_in_a_row: dict[int, int] = {}

    def scale(self, fragment: int, norm: float) -> float | None:
        """`scale_of` with the norms accepted before. A norm is the learner's claim until a merge has measured it: so it
        is `accept`ed only after the merge."""
        scale = scale_of(norm, median_of(self._accepted.get(fragment, ())), self.clip)
        if scale is None:
            self._refuse(fragment)
        return scale

    def accept(self, fragment: int, norm: float) -> None:
        """A delta of this norm, clipped as it was, has been merged."""
        self._accepted.setdefault(fragment, deque(maxlen=MEMORY)).append(norm)
        self._refused_in_a_row[fragment] = 0

    def _refuse(self, fragment: int) -> None:
        refused = self._refused_in_a_row.get(fragment, 0) + 1
        if refused >= PATIENCE:
            self._accepted[fragment].clear()
            refused = 0
        self._refused_in_a_row[fragment] = refused


class ScaleBooks:
    """What a syncer must have multiplied each delta by, recomputed by a verifier. Of one log, fed commit by commit.

    A syncer compares with what it has merged since it began to serve, so its memory follows from the log (the epochs,
    the merges, the refusals) and the payloads. A scale that cannot be recomputed is not checked:

    behind the log's floor   payloads are gone; until 31 newer norms of the fragment, or the next epoch, fill the memory
    damaged payloads         likewise
    three refusals in a row  the memory is forgotten at the third; the log does not tell which of the slot's other
                             deltas were read before, so both scales pass for them

    Norms are sums whose last bits differ between machines, so scales are compared to one part in a million; the merge
    is then recomputed with the very scale that the log gives, bit for bit.
    """

    def __init__(self, clip: float | Literal["none"]) -> None:
        self.clip = clip
        self._accepted: dict[int, deque[float | None]] = {}
        self._refused_in_a_row: dict[int, int] = {}

    def note(self, commit: Commit) -> None:
        """Take in a commit before its inputs are checked: a syncer that begins to serve remembers nothing, and the
        refusals in a merge's commit came before that merge."""
        if isinstance(commit, EpochStart):
            self._accepted, self._refused_in_a_row = {}, {}
        for outcome in commit.outcomes:
            if outcome.reason == "norm_cap":
                self._refused_in_a_row[outcome.fragment] = self._refused_in_a_row.get(outcome.fragment, 0) + 1

    def merged(self, fragment: int, inputs: Sequence[MergedOffer], sources: Sequence[DeltaSource | None]) -> list[str]:
        """The errors in the scales of one merge, whose norms enter the books. `sources`: None for a missing delta."""
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
        """The possible medians of the syncer's memory; empty if that cannot be known."""
        accepted = self._accepted.get(fragment, deque())
        known = [norm for norm in accepted if norm is not None]
        if len(accepted) >= FEWEST and len(known) < len(accepted):
            return []
        forgotten = self._refused_in_a_row.get(fragment, 0) >= PATIENCE
        return [median_of(known), *([None] if forgotten else [])]

    def _wrong(self, item: MergedOffer, norm: float, medians: list[float | None]) -> str:
        possible = [scale_of(norm, median, self.clip) for median in medians]
        near = any(median is not None and isclose(norm, CAP * median, rel_tol=TOLERANCE) for median in medians)
        fits = any(scale is not None and isclose(item.scale, scale, rel_tol=TOLERANCE) for scale in possible)
        if near or fits:
            return ""
        who = f"offer {item.incarnation}/{item.seq} of {item.learner}"
        if possible[0] is None:
            return f"{who} is merged, and is {norm / (medians[0] or norm):.1f} times as long as usual"
        return f"{who} is scaled by {item.scale:g}, where its length gives {possible[0]:g}"
