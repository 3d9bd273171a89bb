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
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median_low

from diloco_cli.protocol.quorum import Pace, SlotFacts, longest_exchange_s, measured_pace, window_start_s
from diloco_cli.protocol.records import Offer, RunFormat
from diloco_cli.protocol.state import Window

TIMES_SEEN = 32
MOST_FASTER = 4.0  # than it takes part: it may have to wait for slower ones
MOST_SLOWER = 8.0  # for grace, which its own word makes longer, is not counted in


def believed_slot_s(claimed_s: float, seen_s: Sequence[float], waited_s: Sequence[float]) -> float:
    """`claimed_s`, as far as it can be true beside `seen_s`: the times between the last merges that it took part in.

    The least is by their median, for one long outage says nothing. The most is by the mean of those that were waited
    for: what has piled up in an outage is merged as fast as the syncer can, and says nothing of the learners."""
    return min(max(claimed_s, median_low(seen_s) / MOST_FASTER), fmean(waited_s) * MOST_SLOWER)


class Pacer:
    """Of one syncer process, which begins with what its predecessor told, or with what was planned at the launch: a
    guess, which may be wrong by any factor. The first word that can be held against the clock takes its place, and
    before that nobody is told of a pace."""

    def __init__(self, run: RunFormat) -> None:
        self.pace = Pace(min(i.local_steps * i.step_s for i in run.islands) / run.num_fragments)
        self._is_guess = True
        self._stale_after_slots = run.settings.sync.staleness_rounds * run.num_fragments
        self._grace_s = 0.0
        self._took_part: dict[str, deque[tuple[float, bool]]] = {}

    def begin(self, window: Window | None) -> None:
        """`window`: of the log's newest merge."""
        if window is not None and window.slot_s > 0:
            self._measured(window.slot_s)

    @property
    def told_slot_s(self) -> float:
        """For the log; 0: nothing is known."""
        return 0.0 if self._is_guess else self.pace.slot_s

    def _measured(self, slot_s: float) -> None:
        self.pace, self._is_guess = replace(self.pace, slot_s=slot_s), False

    def merged(self, offers: Sequence[Offer], facts: SlotFacts, now_s: float) -> None:
        """Moving averages from the participants' own timings and from this syncer's clock."""
        reached_s = window_start_s(facts)
        self._grace_s += facts.now_s - reached_s
        for offer in offers:
            merges = self._took_part.setdefault(offer.learner, deque(maxlen=TIMES_SEEN + 1))
            merges.append((now_s - self._grace_s, reached_s > facts.waiting_since_s))
        claimed_s = max(o.timings.upload_s + o.timings.adoption_s for o in offers)
        sync_s = now_s - facts.now_s + min(claimed_s, longest_exchange_s(self.pace, self._stale_after_slots))
        slot_s = self._slot_s(offers)
        if self._is_guess and slot_s is not None:
            self._measured(slot_s)
        self.pace = measured_pace(self.pace, slot_s, facts.quorum_took_s, sync_s)

    def _slot_s(self, offers: Sequence[Offer]) -> float | None:
        """None: nobody who was seen before says how fast it is, or what was seen has all piled up before."""
        believed = []
        for offer in offers:
            seen_s, waited_s = self._seen(offer.learner)
            if waited_s and offer.timings.slot_s > 0:
                believed.append(believed_slot_s(offer.timings.slot_s, seen_s, waited_s))
        return min(believed, default=None)

    def _seen(self, learner: str) -> tuple[list[float], list[float]]:
        """The times between its merges on the syncer's clock, less all grace: all of them, and those that were waited
        for. Where nobody was ever waited for, the syncer is the slowest, and all count."""
        gaps = [(later - earlier, waited) for (earlier, _), (later, waited) in pairwise(self._took_part[learner])]
        seen_s = [gap_s for gap_s, _ in gaps]
        waited_s = [gap_s for gap_s, waited in gaps if waited]
        return seen_s, waited_s or (seen_s if len(seen_s) == TIMES_SEEN else [])
