"""The run's pace as its syncer measures it: a learner's stated pace, limited by what the syncer's own clock shows.

The time of a slot is stated by learners. The grace, which learners count as alive, and how often processes poll depend
on it. The fastest participant's statement counts, so one false statement would be enough. But a learner makes one offer
a slot, and the syncer's clock shows how often it takes part: its true pace cannot be many times faster or slower.

    claimed        takes part at, s        believed
    60 s           0, 60, 120, ...         60 s
    1e-9 s         0, 60, 120, ...         60 / MAX_FASTER = 15 s
    1e6 s          0, 60, 120, ...         60 * MAX_SLOWER = 480 s
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median_low

from diloco_cli.protocol.log.records import Offer, RunFormat
from diloco_cli.protocol.log.state import Window
from diloco_cli.protocol.rules.quorum import Pace, SlotFacts, max_exchange_s, measured_pace, window_start_s

TIMES_SEEN = 32
MAX_FASTER = 4.0  # than it takes part: it may have to wait for slower learners
MAX_SLOWER = 8.0  # than it takes part, without the grace, which its own statement makes longer


@dataclass(frozen=True)
class Gap:
    """The time between two merges that a learner took part in, on the syncer's clock: `whole_s`, and `seconds` without
    the grace that passed in between. `waited`: the syncer waited for the second merge's quorum."""

    whole_s: float
    seconds: float
    waited: bool


def believed_slot_s(claimed_s: float, seen: Sequence[Gap], compared: Sequence[Gap]) -> float:
    """`claimed_s`, limited by the gaps between the last merges that its learner took part in.

    The lower limit uses the median of the gaps `seen`, because one long outage must not count. The upper limit uses the
    mean of the gaps `compared`: offers that piled up in an outage are merged as fast as the syncer can, and such gaps
    do not show the learners' pace. A grace lasts for one slot at most, so half of a whole gap can always be a slot."""
    least_s = median_low(gap.seconds for gap in seen) / MAX_FASTER
    max_s = max(fmean(gap.seconds for gap in compared) * MAX_SLOWER, median_low(gap.whole_s for gap in compared) / 2)
    return min(max(claimed_s, least_s), max_s)


class Pacer:
    """The pace of one syncer process. It begins with its predecessor's pace, or with the pace planned at the launch: a
    guess, which may be wrong by any factor. The first statement that can be compared with the clock replaces the guess;
    until then commits state no pace."""

    def __init__(self, run: RunFormat) -> None:
        self.pace = Pace(min(i.local_steps * i.step_s for i in run.islands) / run.num_fragments)
        self._is_guess = True
        self._stale_after_slots = run.settings.sync.staleness_rounds * run.num_fragments
        self._grace_s = 0.0
        self._took_part: dict[str, deque[tuple[float, float, bool]]] = {}

    def begin(self, window: Window | None) -> None:
        """`window`: the window of the log's newest merge."""
        if window is not None and window.slot_s > 0:
            self._measured(window.slot_s)

    @property
    def told_slot_s(self) -> float:
        """Seconds per slot as commits state it; 0: the pace is not known yet."""
        return 0.0 if self._is_guess else self.pace.slot_s

    def _measured(self, slot_s: float) -> None:
        self.pace, self._is_guess = replace(self.pace, slot_s=slot_s), False

    def merged(self, offers: Sequence[Offer], facts: SlotFacts, now_s: float) -> None:
        """Moving averages from the participants' own timings and from this syncer's clock."""
        reached_s = window_start_s(facts)
        self._grace_s += facts.now_s - reached_s
        for offer in offers:
            merges = self._took_part.setdefault(offer.learner, deque(maxlen=TIMES_SEEN + 1))
            merges.append((now_s, self._grace_s, reached_s > facts.waiting_since_s))
        claimed_s = max(o.timings.upload_s + o.timings.adoption_s for o in offers)
        sync_s = now_s - facts.now_s + min(claimed_s, max_exchange_s(self.pace, self._stale_after_slots))
        slot_s = self._slot_s(offers)
        if self._is_guess and slot_s is not None:
            self._measured(slot_s)
        self.pace = measured_pace(self.pace, slot_s, facts.quorum_took_s, sync_s)

    def _slot_s(self, offers: Sequence[Offer]) -> float | None:
        """The fastest believed pace; None: no participant states one, or none has a gap to compare it with."""
        believed = []
        for offer in offers:
            seen = self._seen(offer.learner)
            compared = self._to_compare(seen)
            if compared and offer.timings.slot_s > 0:
                believed.append(believed_slot_s(offer.timings.slot_s, seen, compared))
        return min(believed, default=None)

    def _seen(self, learner: str) -> list[Gap]:
        return [
            Gap(later_s - earlier_s, later_s - earlier_s - (grace_s - grace_before_s), waited)
            for (earlier_s, grace_before_s, _), (later_s, grace_s, waited) in pairwise(self._took_part[learner])
        ]

    def _to_compare(self, seen: Sequence[Gap]) -> Sequence[Gap]:
        """The gaps in which the syncer waited for the quorum. Where it never waited, the syncer is the slowest process
        and all gaps count; so they do at the beginning of a run, when no offers can have piled up."""
        waited = [gap for gap in seen if gap.waited]
        return waited or (seen if self._is_guess or len(seen) == TIMES_SEEN else [])
