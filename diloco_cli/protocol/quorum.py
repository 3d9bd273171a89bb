"""When to merge: minimum quorum and the adaptive grace window, as pure functions that also give their reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

SMOOTHING = 0.5  # of the moving averages below
MOST_CHANGE = 4.0
MIN_ALIVE_S = 15.0
ALIVE_SLOTS = 4
LATE_SLOTS = 1.5  # half a slot beyond its due time, so that who is on time is not overtaken by its own jitter


def moving_average(average: float | None, value: float) -> float:
    return value if average is None else average + SMOOTHING * (value - average)


@dataclass(frozen=True)
class Pace:
    """Seconds, smoothed. `slot_s`: the fastest participant's time between its slots. `quorum_s`: from a slot's first
    offer to its quorum. `sync_s`: upload + load, merge and commit + adoption."""

    slot_s: float
    quorum_s: float = 0.0
    sync_s: float = 0.0


def measured_pace(pace: Pace, slot_s: float | None, quorum_s: float, sync_s: float) -> Pace:
    """The averages after one more merge; `slot_s` None: no participant said how fast it is.

    That is a stranger's word, on which hang the grace, who counts as alive, and how long a refusal waits for company:
    of one merge it changes the pace by a factor of `MOST_CHANGE` at most."""
    if slot_s is not None and pace.slot_s > 0:
        slot_s = min(max(slot_s, pace.slot_s / MOST_CHANGE), pace.slot_s * MOST_CHANGE)
    return Pace(
        slot_s=pace.slot_s if slot_s is None else moving_average(pace.slot_s, slot_s),
        quorum_s=moving_average(pace.quorum_s, quorum_s),
        sync_s=moving_average(pace.sync_s, sync_s),
    )


def longest_exchange_s(pace: Pace, stale_after_slots: int) -> float:
    """What a learner may say of its own upload and adoption: one that took longer would come too late to count."""
    return max(1, stale_after_slots) * pace.slot_s + MIN_ALIVE_S


def alive_within_s(pace: Pace) -> float:
    """Who has been heard of within so many seconds counts as alive."""
    return max(MIN_ALIVE_S, ALIVE_SLOTS * pace.slot_s)


def overlap_slots(setting: int | Literal["auto"], pace: Pace) -> int:
    """tau. `auto`: the smallest tau whose slots cover quorum and synchronisation, plus one slot, because the grace
    window lives on what is left over (with no slack at all K = 1 merges single learners and quality collapses)."""
    if setting != "auto":
        return setting
    if pace.slot_s <= 0:
        return 1
    return ceil((pace.quorum_s + pace.sync_s) / pace.slot_s) + 1


@dataclass(frozen=True)
class Grace:
    """How long to go on waiting after the quorum, and why."""

    seconds: float
    reason: str


def grace_window(setting: int | Literal["auto"], pace: Pace, gamma: float) -> Grace:
    """xi_slack = tau * xi_step - (xi_quorum + xi_sync); the window is gamma * slack, at most one slot
    (arXiv 2604.21428, adaptive grace window; through a bucket a slot takes the place of the paper's step)."""
    tau = overlap_slots(setting, pace)
    slack_s = tau * pace.slot_s - (pace.quorum_s + pace.sync_s)
    if slack_s <= 0:
        needed = overlap_slots("auto", pace)
        return Grace(0.0, f"no slack: {tau} slots of overlap are too few, {needed} are needed")
    seconds = min(gamma * slack_s, pace.slot_s)
    return Grace(seconds, f"{gamma:g} of {slack_s:.2f} s slack, at most one slot of {pace.slot_s:.2f} s")


@dataclass(frozen=True)
class SlotFacts:
    """What the syncer knows about the slot that is due. Times are seconds on the syncer's own clock."""

    present: int
    alive: int
    quorum: int
    first_offer_s: float | None
    quorum_reached_s: float | None
    later_offers: bool
    waiting_since_s: float
    now_s: float
    late: int = 0  # of those present: made for an earlier slot, and not yet counted for the quorum
    late_count_at_s: float = 0.0

    @property
    def counted(self) -> int:
        return self.present - self.late


@dataclass(frozen=True)
class Decision:
    """merge, wait (until `until_s`, if that is known) or skip, with the reason that people read in `status`."""

    action: Literal["merge", "wait", "skip"]
    reason: str
    until_s: float | None = None


def late_offers_count_after_s(pace: Pace, skip_after_s: float) -> float:
    """How long a slot must have been due before an offer that was made for an earlier slot makes its quorum.

    At K = 1 such an offer alone would merge each slot as soon as it opens, a whole slot before anybody has reached it:
    the slots would run ahead of all learners. It lies there for the slot's whole time instead, joins whoever comes, and
    carries the slot only if nobody does; at the latest when the slot could be skipped."""
    return min(LATE_SLOTS * pace.slot_s, skip_after_s)


@dataclass
class Watch:
    """One slot as its syncer sees it happen, from the moment at which it is due."""

    due_s: float
    first_offer_s: float | None = None
    quorum_s: float | None = None

    def look(
        self, slot: int, offered_for: Sequence[int], alive: int, quorum: int, later_offers: bool,
        late_after_s: float, now_s: float,
    ) -> SlotFacts:  # fmt: skip
        """`offered_for`: the slots for which those who are present have made their offers."""
        late_count_at_s = self.due_s + late_after_s
        late = sum(made_for < slot for made_for in offered_for) if now_s < late_count_at_s else 0
        counted = len(offered_for) - late
        if counted and self.first_offer_s is None:
            self.first_offer_s = now_s
        if counted >= quorum and self.quorum_s is None:
            self.quorum_s = now_s
        return SlotFacts(
            present=len(offered_for),
            alive=alive,
            quorum=quorum,
            first_offer_s=self.first_offer_s,
            quorum_reached_s=self.quorum_s,
            later_offers=later_offers,
            waiting_since_s=self.due_s,
            now_s=now_s,
            late=late,
            late_count_at_s=late_count_at_s,
        )


def decide_slot(facts: SlotFacts, grace: Grace, skip_after_s: float) -> Decision:
    """Merge at quorum plus grace; earlier when all who are alive are here; skip a slot that nobody can fill while
    offers for later slots wait; otherwise wait, and say for what.

    counted < K               wait, however many are alive; after `skip_after_s` with offers for later slots: skip
    K > alive                 the same: nobody lowers the quorum; the learners drift up to their bound, then pause
    present >= alive, >= K    merge at once (one learner alone, too; nobody alive counts as everybody here)
    counted >= K otherwise    merge when the grace is over, which is at once where there is no slack

    Who came late for an earlier slot is present, and in the merge if there is one, but counts only later (`Watch`).
    """
    if facts.counted < facts.quorum:
        missing = f"{facts.counted} of the {facts.quorum} offers that the quorum needs"
        if facts.later_offers and facts.now_s - facts.waiting_since_s >= skip_after_s:
            return Decision("skip", f"{missing} after {skip_after_s:g} s, while later slots wait")
        if facts.late:
            return Decision("wait", f"{missing}, and {facts.late} late for an earlier slot", facts.late_count_at_s)
        return Decision("wait", missing)
    if facts.present >= facts.alive:
        return Decision("merge", f"all {facts.present} learners alive are here")
    reached_s = facts.quorum_reached_s if facts.quorum_reached_s is not None else facts.now_s
    until_s = reached_s + grace.seconds
    if facts.now_s >= until_s:
        return Decision(
            "merge", f"{facts.present} of {facts.alive} after {grace.seconds:.2f} s of grace ({grace.reason})"
        )
    return Decision("wait", f"{facts.present} of {facts.alive}, in the grace window ({grace.reason})", until_s)
