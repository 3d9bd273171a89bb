"""The run's pace as its syncer measures it: what learners say of their own is believed beside what the syncer sees.

A slot's time is a learner's word, and on it hang the grace, who counts as alive, and how often everybody looks for what
comes. The fastest participant's word counts, so one stranger is enough. But a learner makes one offer a slot, and the
syncer's own clock shows how often it takes part: nobody is many times faster than that, or slower.

    claimed        takes part at, s        believed
    60 s           0, 60, 120, ...         60 s
    1e-9 s         0, 60, 120, ...         60 / MOST_FASTER = 15 s
    1e6 s          0, 60, 120, ...         60 * MOST_SLOWER = 480 s
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median_low

from diloco_cli.protocol.quorum import Pace, SlotFacts, longest_exchange_s, measured_pace
from diloco_cli.protocol.records import Offer, RunFormat

TIMES_SEEN = 32
MOST_FASTER = 4.0  # than it takes part: it may have to wait for slower ones
MOST_SLOWER = 8.0  # for grace, which its own word makes longer, is not counted in


def believed_slot_s(claimed_s: float, seen_s: Sequence[float]) -> float:
    """`claimed_s`, as far as it can be true beside `seen_s`: the times between the last merges that it took part in.

    The least is by their median, for one long outage says nothing; the most by their mean, for what comes after an
    outage comes in a burst."""
    return min(max(claimed_s, median_low(seen_s) / MOST_FASTER), fmean(seen_s) * MOST_SLOWER)


class Pacer:
    """Of one syncer process, which begins with what was planned at the launch."""

    def __init__(self, run: RunFormat) -> None:
        self.pace = Pace(min(i.local_steps * i.step_s for i in run.islands) / run.num_fragments)
        self._stale_after_slots = run.settings.sync.staleness_rounds * run.num_fragments
        self._grace_s = 0.0
        self._took_part_s: dict[str, deque[float]] = {}  # by learner; on the syncer's clock, less all grace

    def merged(self, offers: Sequence[Offer], facts: SlotFacts, now_s: float) -> None:
        """Moving averages from the participants' own timings and from this syncer's clock."""
        reached_s = facts.now_s if facts.quorum_reached_s is None else facts.quorum_reached_s
        quorum_s = reached_s - (facts.now_s if facts.first_offer_s is None else facts.first_offer_s)
        self._grace_s += facts.now_s - reached_s
        for offer in offers:
            times = self._took_part_s.setdefault(offer.learner, deque(maxlen=TIMES_SEEN + 1))
            times.append(now_s - self._grace_s)
        claimed_s = max(o.timings.upload_s + o.timings.adoption_s for o in offers)
        sync_s = now_s - facts.now_s + min(claimed_s, longest_exchange_s(self.pace, self._stale_after_slots))
        self.pace = measured_pace(self.pace, self._slot_s(offers), quorum_s, sync_s)

    def _slot_s(self, offers: Sequence[Offer]) -> float | None:
        """None: nobody who was seen before says how fast it is."""
        believed = []
        for offer in offers:
            seen_s = [later - earlier for earlier, later in pairwise(self._took_part_s[offer.learner])]
            if seen_s and offer.timings.slot_s > 0:
                believed.append(believed_slot_s(offer.timings.slot_s, seen_s))
        return min(believed, default=None)
