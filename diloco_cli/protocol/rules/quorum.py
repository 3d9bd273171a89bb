"""When to merge: minimum quorum and the adaptive grace window, as pure functions that also give their reason."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from diloco_cli.formulas import formula

SMOOTHING = 0.5  # of the moving averages below
MAX_CHANGE = 4.0
MIN_ALIVE_S = 15.0
FOLLOWS, FOLLOWS_WITHIN = 0.25, 0.04  # a share; slots. Their product, 0.01 slots, exceeds the error of stated paces
ALIVE_SLOTS = 4
PATIENCE_SLOTS = 4


def moving_average(average: float | None, value: float) -> float:
    return value if average is None else average + SMOOTHING * (value - average)


@dataclass(frozen=True)
class Pace:
    """Seconds, smoothed. `slot_s`: the time of a slot (rules/pacing.py). `quorum_s`: from a slot's first
    offer to its quorum. `sync_s`: upload + load, merge and commit + adoption."""

    slot_s: float
    quorum_s: float = 0.0
    sync_s: float = 0.0


def measured_pace(pace: Pace, slot_s: float | None, quorum_s: float, sync_s: float) -> Pace:
    """The averages after one more merge; `slot_s` None: it is not known yet.

    The grace, which learners count as alive, and how long outcomes wait for the next commit depend on `slot_s`. So the
    value of one merge counts within a factor of `MAX_CHANGE` of the pace."""
    if slot_s is not None and pace.slot_s > 0:
        slot_s = min(max(slot_s, pace.slot_s / MAX_CHANGE), pace.slot_s * MAX_CHANGE)
    return Pace(
        slot_s=pace.slot_s if slot_s is None else moving_average(pace.slot_s, slot_s),
        quorum_s=moving_average(pace.quorum_s, quorum_s),
        sync_s=moving_average(pace.sync_s, sync_s),
    )


def max_exchange_s(pace: Pace, stale_after_slots: int) -> float:
    """The longest upload and adoption that a learner may state: with a longer one its offers would come too late."""
    return max(1, stale_after_slots) * pace.slot_s + MIN_ALIVE_S


def alive_within_s(pace: Pace) -> float:
    """A learner that the syncer has heard from within so many seconds counts as alive."""
    return max(MIN_ALIVE_S, ALIVE_SLOTS * pace.slot_s)


def patience_s(skip_after_s: float, slot_s: float) -> float:
    """How long a slot waits for its quorum while offers for later slots wait: at least some slots, because islands of
    unlike speed reach a slot far apart where slots are long."""
    return max(skip_after_s, PATIENCE_SLOTS * slot_s)


def overlap_slots(setting: int | Literal["auto"], pace: Pace) -> int:
    """tau. `auto`: the smallest tau whose slots cover quorum and synchronisation, plus one slot, because the grace
    window takes its time from the slack (without slack, K = 1 merges single learners and quality collapses)."""
    if setting != "auto":
        return setting
    if pace.slot_s <= 0:
        return 1
    return covering_slots(pace.quorum_s + pace.sync_s, pace.slot_s)


@formula("schedule", "slots that cover an exchange", "slots")
def covering_slots(exchange_s: float, slot_s: float) -> int:
    return ceil(exchange_s / slot_s) + 1


@dataclass(frozen=True)
class Grace:
    """How long to go on waiting after the quorum, and why."""

    seconds: float
    reason: str


MAX_GRACE_SLOTS = 1.0


@formula("schedule", "grace", "s")
def grace_seconds(gamma: float, slack_s: float, slot_s: float) -> float:
    """gamma x slack, at most one slot. The syncer and the plan both use this."""
    return min(max(0.0, gamma * slack_s), MAX_GRACE_SLOTS * slot_s)


def grace_window(setting: int | Literal["auto"], pace: Pace, gamma: float) -> Grace:
    """xi_slack = tau * xi_step - (xi_quorum + xi_sync); the window is gamma * slack, at most one slot
    (arXiv 2604.21428, adaptive grace window; through a bucket a slot takes the place of the paper's step)."""
    tau = overlap_slots(setting, pace)
    slack_s = tau * pace.slot_s - (pace.quorum_s + pace.sync_s)
    if slack_s <= 0:
        needed = overlap_slots("auto", pace)
        return Grace(0.0, f"no slack: {tau} slots of overlap are too few, {needed} are needed")
    seconds = grace_seconds(gamma, slack_s, pace.slot_s)
    return Grace(seconds, f"{gamma:g} of {slack_s:.2f} s slack, at most one slot of {pace.slot_s:.2f} s")


@dataclass(frozen=True)
class SlotFacts:
    """What the syncer knows about the slot that is due. Times are seconds on the syncer's own clock.

    `opens_s`: when the slot's window begins at the earliest. `passed`: learners alive that have offered for later slots
    and not for this one: none of them will offer for it. `beside`: learners that have offered for this slot so long ago
    that they do not count as alive: their steps span many slots.
    `window_from_s`: when the grace window begins, which may lie in the future; None while the quorum is not reached.
    `quorum_took_s`: from the first offer to the quorum."""

    present: int
    alive: int
    quorum: int
    window_from_s: float | None
    later_offers: bool
    waiting_since_s: float
    now_s: float
    opens_s: float = -inf
    passed: int = 0
    beside: int = 0
    quorum_took_s: float = 0.0

    @property
    def expected(self) -> int:
        """Learners that have offered for this slot, or are alive and may do so yet."""
        return self.alive + self.beside - self.passed


@dataclass(frozen=True)
class SlotDecision:
    """merge, wait (until `until_s`, if that is known) or skip, with the reason that people read in `status`."""

    action: Literal["merge", "wait", "skip"]
    reason: str
    until_s: float | None = None


@dataclass
class Watch:
    """What a syncer has seen of one slot since it became due.

    `not_before_s`: before this moment a quorum does not count as reached. Offers may lie in the bucket long before
    their slot is due: an island's step may span several slots, or a learner aims ahead because its link is slow.
    At K = 1 such an offer alone would merge each slot as soon as it opens, and the slots would run ahead of all
    learners; so the window of a slot begins one slot interval after the window of the slot before."""

    due_s: float
    not_before_s: float = -inf
    first_offer_s: float | None = None
    enough_s: float | None = None

    def look(
        self,
        present: int,
        alive: int,
        quorum: int,
        later_offers: bool,
        now_s: float,
        passed: int = 0,
        beside: int = 0,
    ) -> SlotFacts:
        if present and self.first_offer_s is None:
            self.first_offer_s = now_s
        if present < quorum:
            self.enough_s = None
        elif self.enough_s is None:
            self.enough_s = now_s
        first_s = now_s if self.first_offer_s is None else self.first_offer_s
        enough_s = self.enough_s
        quorum_s = now_s if enough_s is None else enough_s
        return SlotFacts(
            present=present,
            alive=alive,
            quorum=quorum,
            window_from_s=None if enough_s is None else max(enough_s, self.not_before_s),
            later_offers=later_offers,
            waiting_since_s=self.due_s,
            now_s=now_s,
            opens_s=max(self.due_s, self.not_before_s),
            passed=passed,
            beside=beside,
            quorum_took_s=max(0.0, quorum_s - max(first_s, self.not_before_s)),
        )


def window_start_s(facts: SlotFacts) -> float:
    """When the window of a slot that is merged now began; never later than now."""
    return facts.now_s if facts.window_from_s is None else min(facts.window_from_s, facts.now_s)


def next_window_s(facts: SlotFacts, slot_s: float) -> float:
    """When the window of the next slot begins, at the earliest: a slot interval after this one's. Where all expected
    learners came, the windows follow the time of the last offer a little, because stated paces are never exact and a
    window that ran ahead of the fastest learner would leave it out. A much later offer does not move them further."""
    from_s = facts.now_s if facts.window_from_s is None else facts.window_from_s
    behind_s = facts.now_s - from_s if facts.present >= facts.expected else 0.0
    max_s = FOLLOWS_WITHIN * slot_s
    return from_s + slot_s + FOLLOWS * min(max(behind_s, -max_s), max_s)


def decide_slot(facts: SlotFacts, grace: Grace, wait_s: float) -> SlotDecision:
    """Merge at quorum plus grace; earlier when all expected learners have offered; skip a slot whose quorum cannot be
    reached while offers for later slots wait; otherwise wait, and say for what.

    present < K                 wait; skip once its window is open and fewer than K learners alive can still come, or
                                when K of them have passed it by and its window would be over, or after
                                `wait_s` with offers for later slots
    K > alive                   wait, or skip for the last two reasons: the quorum is not lowered; the learners drift up
                                to their bound, then pause
    present >= expected, >= K   merge at once (also one learner alone, and where no learner counts as alive)
    present >= K otherwise      merge when the grace is over, which is at once where there is no slack
    """
    if facts.present < facts.quorum:
        missing = f"{facts.present} of the {facts.quorum} offers that the quorum needs"
        closed = facts.passed >= facts.quorum and facts.now_s >= facts.opens_s + grace.seconds
        if closed or (facts.expected < facts.quorum <= facts.alive and facts.now_s >= facts.opens_s):
            return SlotDecision(
                "skip", f"{missing}, and {facts.passed} of {facts.alive} alive have passed this slot by"
            )
        if facts.later_offers and facts.now_s - facts.waiting_since_s >= wait_s:
            return SlotDecision("skip", f"{missing} after {wait_s:g} s, while later slots wait")
        return SlotDecision("wait", missing)
    if facts.present >= facts.expected:
        return SlotDecision("merge", f"all {facts.present} learners are here that may come")
    from_s = facts.now_s if facts.window_from_s is None else facts.window_from_s
    until_s = from_s + grace.seconds
    if facts.now_s >= until_s:
        return SlotDecision(
            "merge",
            f"{facts.present} of {facts.alive + facts.beside} after {grace.seconds:.2f} s of grace ({grace.reason})",
        )
    return SlotDecision(
        "wait", f"{facts.present} of {facts.alive + facts.beside}, in the grace window ({grace.reason})", until_s
    )
