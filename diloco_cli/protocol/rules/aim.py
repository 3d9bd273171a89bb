"""For which slot a learner makes its next offer, and after which step: a slot that the offer can really reach.

An offer counts for the slot that it names and for no other. A merge says when the windows of the next slots begin and
close (`Window`), and the syncer keeps to that. So a learner knows, on its own clock, from when on an offer for slot s
is waited for, and from when on it is too late, less the time that an offer is on its way. It offers for s

    by its steps    when H_i / P of them have been made since the slot before
    by the clock    before that, if after one more step the others would have to wait for it; with
                    `local_steps: planned` only if after one more step it would be too late

and what comes too late for its window is not sent: the slot is passed by, and the next one takes its place. So learners
that are a little slower than the others never fall out of step, and an island whose step lasts for several slots offers
for all of them at once. Not known is what the learner cannot see: a relay between two buckets, a mirror that lags. That
shows in offers that come late although they were sent in time, and is added to their way (`hidden_s`).

Pure: time is handed in, in seconds on the learner's own clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median_low
from typing import Literal

from diloco_cli.protocol.log.state import RunState, Window

TAKEN = 16  # the newest offers, whose time on their way is remembered
DEVIATIONS = 2.0  # of that time, beyond its median, that are reckoned with
HIDDEN_STEP = 0.5  # of a slot, that one offer more on its way is allowed after it came late
HIDDEN_LESS = 0.02  # of a slot, after each offer that was merged: the way may have become shorter
TOLERATED = 0.25  # of the grace, that an offer may come after its window began: learners' times are never exact
SPACINGS = 4  # the newest seconds a slot between heads, of which the fewest count
STALLED = 1.0  # slots beyond its time without the next commit: the log stands still, and the slot that is due is open
EARLY = 1.0  # slots, or one step, that an offer may come before its window begins


@dataclass
class Delivery:
    """How long an upload takes: its median and median deviation, for one hiccup says nothing of the next, and the first
    one alone may have been a hiccup; what is hidden of its way; and how many are `waiting` to be uploaded, one after
    the other, which is done at `free_s`."""

    measured_s: float = 0.0
    hidden_s: float = 0.0
    waiting: int = 0
    free_s: float = -inf
    _taken_s: deque[float] = field(default_factory=lambda: deque(maxlen=TAKEN))

    def expected_s(self, now_s: float, before: int = 0) -> float:
        """From now until the syncer has one more offer, with so many others sent before it."""
        return max(0.0, self.free_s - now_s) + (before + 1) * self.measured_s + self.hidden_s

    def sent(self, now_s: float) -> None:
        self.waiting += 1
        self.free_s = max(self.free_s, now_s) + self.measured_s

    def done(self, now_s: float, seconds: float | None) -> None:
        """`seconds`: that its upload took; None if there was nothing to upload any more."""
        if seconds is not None:
            self._taken_s.append(seconds)
            middle_s = median_low(self._taken_s)
            deviation_s = median_low(abs(taken_s - middle_s) for taken_s in self._taken_s)
            self.measured_s = middle_s + DEVIATIONS * deviation_s if len(self._taken_s) > 1 else 0.0
        self.waiting -= 1
        self.free_s = now_s + self.waiting * self.measured_s


@dataclass
class Shot:
    """One offer on its way to its slot: when that slot's window closes, whether this incarnation was known to the
    syncer when it was sent (before, nobody looks for its offers), and when it arrived as far as can be seen."""

    closes_s: float
    known: bool
    arrived_s: float | None = None


@dataclass
class Aim:
    """Of one incarnation. `max_ahead`: slots that an offer may name beyond the head (see eligibility.max_ahead);
    `next_slot`: the one after its newest offer's. `reached`: where on the line of slots its own steps have brought it;
    slot s is due from s + 1 on. `unsent`: how many slots' worth of steps it has made since its newest offer. `pace`:
    `steps`: by these alone; `planned`: by the clock so that none is too late; `measured`: so that nobody waits for it.
    `closes`: False where no merge goes on without this learner, and so no offer is ever too late."""

    num_fragments: int
    head: int
    pace: Literal["steps", "planned", "measured"] = "measured"
    closes: bool = True
    window: Window | None = None
    max_ahead: int = 4096
    head_since_s: float = -inf
    skipped: bool = False
    delivery: Delivery = field(default_factory=Delivery)
    next_slot: int = 0
    reached: float = 0.0
    unsent: float = 0.0
    passed: int = 0
    known: bool = False
    _shots: dict[int, Shot] = field(default_factory=dict)
    _spacings_s: deque[float] = field(default_factory=lambda: deque(maxlen=SPACINGS))

    def __post_init__(self) -> None:
        self.begin_at(self.head)

    # -- what happens -------------------------------------------------------------------------------------------

    def stepped(self, local_steps: float) -> None:
        self.reached += self.num_fragments / local_steps
        self.unsent += self.num_fragments / local_steps

    def heard(self, state: RunState, since_s: float, now_s: float) -> None:
        """A newer head: it appeared after `since_s`, when it was not there yet, and is there now."""
        advanced = state.slot - self.head
        if advanced > 0:
            slot_s = 0.0 if self.window is None else self.window.slot_s
            before_s, expected_s = self.head_since_s, self.head_since_s + advanced * slot_s
            self.head_since_s = min(max(since_s, expected_s), now_s)
            if before_s > -inf:
                self._spacings_s.append((self.head_since_s - before_s) / advanced)
            self.skipped = all(output.slot < state.slot - 1 for output in state.outputs)
        self.head, self.window = state.slot, state.window

    def begin_at(self, head: int) -> None:
        """No offer is on its way any more that counts, and none has a slot."""
        self.next_slot, self.reached, self.unsent = head, float(head), 0.0
        self._shots.clear()

    def sent(self, slot: int, now_s: float) -> None:
        self._shots[slot] = Shot(self.closes_s(slot, now_s), self.known)
        self.delivery.sent(now_s)

    def delivered(self, slot: int, seconds: float | None, now_s: float) -> None:
        """Its upload took so long, and has just ended; None: there was nothing to upload any more."""
        self.delivery.done(now_s, seconds)
        if seconds is not None and (shot := self._shots.get(slot)) is not None:
            shot.arrived_s = now_s

    def settled(self, slot: int, in_time: bool | None, too_far: bool = False) -> None:
        """The outcome of the offer for this slot, as far as its way decided it; None: it did not. `too_far`: its base
        was too old by then, as it is each time if more seems to be hidden of the way than is."""
        shot = self._shots.pop(slot, None)
        if too_far:
            self.delivery.hidden_s /= 2
            return
        if in_time is None:
            return
        slot_s = 0.0 if self.window is None else self.window.slot_s
        if in_time:
            self.delivery.hidden_s = max(0.0, self.delivery.hidden_s - HIDDEN_LESS * slot_s)
        elif shot is not None and shot.known and shot.arrived_s is not None and shot.closes_s < inf:
            hidden_s = min(shot.closes_s, self._closed_s(slot)) - shot.arrived_s
            if hidden_s >= 0:
                more_s = max(self.delivery.hidden_s, hidden_s) + HIDDEN_STEP * slot_s
                self.delivery.hidden_s = min(more_s, self.num_fragments * slot_s)

    def _closed_s(self, slot: int) -> float:
        """When the half of a merged slot's grace was over, at the latest, as the head tells now."""
        if self.window is None:
            return inf
        passed_s = (self.head - slot) * self.window.slot_s
        return self.head_since_s + self.window.opens_s - passed_s + self.window.grace_s / 2

    # -- what follows -------------------------------------------------------------------------------------------

    def opens_s(self, slot: int, now_s: float) -> float:
        """When the window of a slot begins; `-inf` where nothing is known of it yet. While the log stands still, and
        after a slot was skipped, too few are there: the window of the slot that is due is open, until all have met.
        A syncer that is behind its windows takes what is there for a slot when it has merged the slots before."""
        if self.window is None or self.window.slot_s <= 0:
            return -inf
        return max(self._planned_s(slot, now_s), self._merges_from_s(slot) - self.window.grace_s)

    def _planned_s(self, slot: int, now_s: float) -> float:
        """As the head tells."""
        assert self.window is not None
        first_s = now_s if self._stands_still(now_s) else self.head_since_s + self.window.opens_s
        return first_s + (slot - self.head) * self.window.slot_s

    def closes_s(self, slot: int, now_s: float) -> float:
        """When the window of a slot closes, at the earliest; `inf` where that is not known, or never happens."""
        opens_s = self.opens_s(slot, now_s)
        if self.window is None or opens_s == -inf or not self.closes:
            return inf
        return inf if slot == self.head and self._stands_still(now_s) else opens_s + self.window.grace_s

    def _merges_from_s(self, slot: int) -> float:
        """When a syncer that is behind has merged the slots before, as quickly as the quickest of the newest ones."""
        return self.head_since_s + (slot - self.head) * self._spacing_s if self._spacing_s > 0 else -inf

    @property
    def _spacing_s(self) -> float:
        """Seconds a slot; 0 where the syncer keeps to its windows, or too little was seen of it."""
        is_behind = self.window is not None and self.window.opens_s <= 0
        return min(self._spacings_s) if is_behind and len(self._spacings_s) == SPACINGS else 0.0

    def _stands_still(self, now_s: float) -> bool:
        if self.window is None or self.skipped:
            return self.skipped
        closes_s = self.head_since_s + self.window.opens_s + self.window.grace_s
        return now_s > max(closes_s, self._merges_from_s(self.head + 1)) + STALLED * self.window.slot_s

    def due(self, now_s: float, step_s: float, is_ready: Callable[[int], bool] = lambda slot: True) -> list[int]:
        """The slots to offer for after this step. `step_s`: how long the next one takes. A slot that is not ready yet
        holds up those after it, for as long as it can still be reached: in everybody's eyes it is passed by once there
        is an offer for a later one."""
        slots: list[int] = []
        while True:
            slot = self.first_reachable(now_s, len(slots))
            missed = self.pace == "steps" and slot > self.next_slot  # at once, to be there with the others again
            self.reached = max(self.reached, slot + 1.0 if missed else float(slot))
            if not self._is_due(slot, now_s, step_s):
                break
            if len(slots) == self.num_fragments or not is_ready(slot):
                self.reached = float(slot)  # what it is made of counts from there
                break
            slots.append(slot)
            self.passed += slot - self.next_slot
            self.next_slot, self.unsent = slot + 1, 0.0
        self.reached = min(self.reached, slot + 1.0)
        return slots

    def _is_due(self, slot: int, now_s: float, step_s: float) -> bool:
        """By its steps, or by the clock; unless it is too far ahead of the others, or earlier ones wait to be uploaded
        for longer than a step: an offer that lies somewhere for long would merge old progress."""
        missed_a_round = slot >= self.next_slot + self.num_fragments  # then nobody waits for it any more
        made = max(self.reached - slot, self.unsent if missed_a_round else 0.0)  # others may always be quicker
        has_reached = made >= 1 - 1e-6
        if slot > self.head + self.max_ahead:
            return False
        if self.pace == "steps":
            return has_reached
        opens_s, way_s = self.opens_s(slot, now_s), self.delivery.expected_s(now_s)
        if self.delivery.free_s > now_s + step_s:
            return False
        if self.window is None or opens_s == -inf:
            return has_reached and slot < self.head + self.num_fragments
        if missed_a_round and slot == self.head and self._stands_still(now_s):
            return True  # all meet in the slot that is due
        if has_reached and opens_s - way_s <= now_s + max(step_s, EARLY * self.window.slot_s):
            return True
        late = 1.0 if self.pace == "planned" and not missed_a_round else TOLERATED
        return self.closes_s(slot, now_s) < inf and opens_s + late * self.window.grace_s - way_s < now_s + step_s

    def first_reachable(self, now_s: float, before: int = 0) -> int:
        """The first slot that an offer can reach which is sent now, after so many others. What it cannot reach is
        passed by, and what the log has passed."""
        first = max(self.next_slot, self.head)
        arrives_s = now_s + self.delivery.expected_s(now_s, before)
        if self.window is None or arrives_s <= self.closes_s(first, now_s):
            return first
        missed = (arrives_s - self._planned_s(first, now_s) - self.window.grace_s) / self.window.slot_s
        if self._spacing_s > 0:
            missed = min(missed, (arrives_s - self._merges_from_s(first)) / self._spacing_s)
        return first + min(ceil(missed + 1e-9), self.max_ahead + 1)
