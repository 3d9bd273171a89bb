"""Chooses the slot of a learner's next offer, and the step after which it is sent: a slot that the offer can reach.

An offer counts for the slot that it names and for no other. A merge says when the windows of the next slots begin and
close (`Window`), and the syncer keeps to these times. So a learner knows, on its own clock, when the syncer begins to
wait for an offer for slot s, and when an offer, with the time that it is on its way, is too late. It offers for s

    by its steps    when it has made H_i / P steps since the slot before; not much before the window, but for the slot
                    that is due if it has missed a round, because the others may come early and be merged at once
    by the clock    earlier, if after one more step the other learners would have to wait for it; with
                    `local_steps: planned` only if after one more step the offer would be too late

An offer that would miss its window is not sent: the learner passes the slot by and aims at the next one. So learners
that are a little slower than the others never fall out of step, and an island whose step lasts for several slots offers
for all of them at once. A learner that can reach no slot for two rounds offers once anyway, because only an offer shows
whether its uploads are still too slow. It cannot see every delay: a relay between two buckets, a mirror that lags. Such
a delay shows when an offer comes late although it was sent in time; it is then added to the expected delivery
(`hidden_s`). A syncer that stalls with its window closed makes the same impression once; only a delay that makes an
offer late which was sent with it in mind is kept for long.

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

TAKEN = 16  # upload times remembered, of the newest offers
DEVIATIONS = 2.0  # median deviations added to the median upload time
FASTER_UPLOADS, FASTER = 3, 0.25  # so many uploads in turn below this share of what was expected: a faster link
HIDDEN_STEP = 0.5  # of a slot: added to the hidden delay after an offer came late
HIDDEN_LESS = 0.02  # of a slot: subtracted from it after each offer that was merged, as the delay may have shrunk
UNSURE_LESS = 0.125  # of it, at least, while no offer that was sent with it in mind was late
TOLERATED = 0.25  # of the grace: an offer may come so long after its window began, as learners' times are never exact
SPACINGS = 4  # newest measured times per slot between heads, of which the shortest counts
STALLED = 1.0  # slots without the next commit after it was due: then the log stands still, and the due slot is open
EARLY, EARLY_WHERE_LATE = 0.25, 1.0
"""Slots, or one step: so long before its window begins an offer may come. There it waits for the others'; but where the
syncer is behind its windows, it must not wait for offers."""
PROBE_ROUNDS = 2  # without an offer of this learner, which then sends a probe
PROBE_AGAIN_ROUNDS = 4  # the same after a probe that was not in time


@dataclass
class Delivery:
    """How long an offer takes to reach the syncer. `measured_s`: the median upload time plus median deviations, because
    a single upload, the first one included, may be an outlier; several short ones show that the link has become faster.
    `hidden_s`: delay that the learner cannot see; `sure`: an offer that was sent with it in mind was late all the same.
    `waiting` offers are uploaded one after the other; the last upload ends at `free_s`."""

    measured_s: float = 0.0
    hidden_s: float = 0.0
    sure: bool = False
    waiting: int = 0
    free_s: float = -inf
    _taken_s: deque[float] = field(default_factory=lambda: deque(maxlen=TAKEN))

    def expected_s(self, now_s: float, before: int = 0) -> float:
        """From now until the syncer has one more offer, if `before` others are sent first."""
        return max(0.0, self.free_s - now_s) + (before + 1) * self.measured_s + self.hidden_s

    def was_shorter(self) -> None:
        """A probe came in time: what was measured before no longer holds."""
        self._taken_s.clear()
        self.measured_s, self.hidden_s, self.sure = 0.0, self.hidden_s / 2, False

    def was_in_time(self, slot_s: float) -> None:
        """An offer was merged: the hidden delay may be shorter, or was none."""
        less_s = HIDDEN_LESS * slot_s
        self.hidden_s = max(0.0, self.hidden_s - (less_s if self.sure else max(less_s, UNSURE_LESS * self.hidden_s)))
        self.sure &= self.hidden_s > 0

    def sent(self, now_s: float) -> None:
        self.waiting += 1
        self.free_s = max(self.free_s, now_s) + self.measured_s

    def done(self, now_s: float, seconds: float | None) -> None:
        """An upload ended after `seconds`; None if there was nothing to upload any more."""
        if seconds is not None:
            self._taken_s.append(seconds)
            newest_s = list(self._taken_s)[-FASTER_UPLOADS:]
            if len(newest_s) == FASTER_UPLOADS and max(newest_s) < FASTER * self.measured_s:
                self._taken_s = deque(newest_s, TAKEN)
            middle_s = median_low(self._taken_s)
            deviation_s = median_low(abs(taken_s - middle_s) for taken_s in self._taken_s)
            self.measured_s = middle_s + DEVIATIONS * deviation_s if len(self._taken_s) > 1 else 0.0
        self.waiting -= 1
        self.free_s = now_s + self.waiting * self.measured_s


@dataclass
class Shot:
    """One offer on its way to its slot: when that slot's window closes; whether the syncer knew this incarnation when
    the offer was sent (before that it does not ask for its offers), and whether the learner expected a hidden delay;
    when its upload ended; since when the log is past the slot."""

    closes_s: float
    known: bool
    hides: bool
    arrived_s: float | None = None
    over_s: float = inf


@dataclass
class Aim:
    """The aim of one incarnation. `max_ahead`: how many slots old its base may be (merging.max_ahead).
    `next_slot`: the slot after its newest offer's. `reached`: the slot number that its own steps have brought it to;
    slot s is due from s + 1 on. `unsent`: its steps since its newest offer, in slots. `pace`: offers go by
    steps, and by the clock: `planned`, so that none is too late; `measured`, so that no other learner waits.
    `closes`: False where every merge needs this learner, so that no offer of it is ever too late. `_probed`: the slot
    of its newest probe; the next one comes `_probe_rounds` after its newest offer."""

    num_fragments: int
    head: int
    pace: Literal["planned", "measured"] = "measured"
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
    _probe_rounds: int = PROBE_ROUNDS
    _probed: int = -1

    def __post_init__(self) -> None:
        self.begin_at(self.head)

    # -- what happens -------------------------------------------------------------------------------------------

    def stepped(self, local_steps: float) -> None:
        self.reached += self.num_fragments / local_steps
        self.unsent += self.num_fragments / local_steps

    def heard(self, state: RunState, since_s: float, now_s: float) -> None:
        """The log has a newer head: at `since_s` it was not there yet, at `now_s` it is."""
        advanced = state.slot - self.head
        if advanced > 0:
            slot_s = 0.0 if self.window is None else self.window.slot_s
            before_s, expected_s = self.head_since_s, self.head_since_s + advanced * slot_s
            self.head_since_s = min(max(since_s, expected_s), now_s)
            if before_s > -inf:
                self._spacings_s.append((self.head_since_s - before_s) / advanced)
            self.skipped = all(output.slot < state.slot - 1 for output in state.outputs)
            for slot, shot in self._shots.items():
                if slot < state.slot:
                    shot.over_s = min(shot.over_s, self.head_since_s)
        self.head, self.window = state.slot, state.window

    def begin_at(self, head: int) -> None:
        """Start anew at slot `head`: offers on their way no longer count."""
        self.next_slot, self.reached, self.unsent, self._probed = head, float(head), 0.0, -1
        self._shots.clear()

    def sent(self, slot: int, now_s: float) -> None:
        self._shots[slot] = Shot(self.closes_s(slot, now_s), self.known, self.delivery.hidden_s > 0)
        self.delivery.sent(now_s)

    def delivered(self, slot: int, seconds: float | None, now_s: float) -> None:
        """The upload of this slot's offer took `seconds` and ended at `now_s`; None: there was nothing to upload."""
        self.delivery.done(now_s, seconds)
        if seconds is not None and (shot := self._shots.get(slot)) is not None:
            shot.arrived_s = now_s

    def settled(self, slot: int, in_time: bool | None) -> None:
        """The offer for this slot has its outcome: whether it came in time; None: its delivery decided nothing."""
        shot = self._shots.pop(slot, None)
        if in_time is None:
            return
        slot_s = 0.0 if self.window is None else self.window.slot_s
        if in_time:
            self._probe_rounds = PROBE_ROUNDS
            self.delivery.was_in_time(slot_s)
            if slot == self._probed:
                self.delivery.was_shorter()
        elif shot is not None and shot.known and shot.arrived_s is not None and shot.closes_s < inf:
            more_s = self._hidden_after(shot, shot.arrived_s, self._closed_s(slot), HIDDEN_STEP * slot_s)
            # Offers that come later than a round after their slot have another cause, such as a dead relay.
            self.delivery.hidden_s = min(more_s, max(self.delivery.hidden_s, self.num_fragments * slot_s))
            self.delivery.sure |= shot.hides

    def _hidden_after(self, shot: Shot, arrived_s: float, closed_s: float, step_s: float) -> float:
        """The hidden delay after an offer was late that arrived before its window closed. The slot may be over earlier,
        if the learners that the syncer expects came early: then the next offer must come by so much earlier."""
        closes_s, hidden_s = min(shot.closes_s, closed_s), self.delivery.hidden_s
        if closes_s < arrived_s:
            return hidden_s
        if shot.over_s < arrived_s:
            return hidden_s + min(arrived_s - shot.over_s, step_s)
        return max(hidden_s, min(closes_s, shot.over_s) - arrived_s) + step_s

    def _closed_s(self, slot: int) -> float:
        """When half of a merged slot's grace was over, at the latest, computed from the present head."""
        if self.window is None:
            return inf
        passed_s = (self.head - slot) * self.window.slot_s
        return self.head_since_s + self.window.opens_s - passed_s + self.window.grace_s / 2

    # -- what follows -------------------------------------------------------------------------------------------

    def opens_s(self, slot: int, now_s: float) -> float:
        """When the window of a slot begins; `-inf` while that is unknown. While the log stands still, and after a
        skipped slot, too few learners offer: then the window of the due slot is open until enough offers are there.
        A syncer that is behind its windows merges a slot as soon as it has merged the slots before it."""
        if self.window is None or self.window.slot_s <= 0:
            return -inf
        return max(self._planned_s(slot, now_s), self._merges_from_s(slot) - self.window.grace_s)

    def _planned_s(self, slot: int, now_s: float) -> float:
        """When the window of a slot begins by the newest merge's `Window`."""
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
        """When a syncer that is behind its windows has merged the slots before, at its shortest recent spacing."""
        return self.head_since_s + (slot - self.head) * self._spacing_s if self._spacing_s > 0 else -inf

    @property
    def _spacing_s(self) -> float:
        """Shortest recent seconds per slot; 0 where the syncer keeps to its windows, or too few heads were seen."""
        is_behind = self.window is not None and self.window.opens_s <= 0
        return min(self._spacings_s) if is_behind and len(self._spacings_s) == SPACINGS else 0.0

    def _stands_still(self, now_s: float) -> bool:
        if self.window is None or self.skipped:
            return self.skipped
        closes_s = self.head_since_s + self.window.opens_s + self.window.grace_s
        return now_s > max(closes_s, self._merges_from_s(self.head + 1)) + STALLED * self.window.slot_s

    def due(self, now_s: float, step_s: float, is_ready: Callable[[int], bool] = lambda slot: True) -> list[int]:
        """The slots to offer for after this step. `step_s`: how long the next step takes. A slot that is not ready yet
        delays the slots after it for as long as it can still be reached, because an offer for a later slot tells the
        syncer that this learner has passed the earlier one by."""
        slots: list[int] = []
        while True:
            slot = self.first_reachable(now_s, len(slots))
            self.reached = max(self.reached, float(slot))
            if not self._is_due(slot, now_s, step_s):
                break
            if len(slots) == self.num_fragments or not is_ready(slot):
                self.reached = float(slot)  # its steps count from this slot on
                break
            slots.append(slot)
            self._take(slot)
        self.reached = min(self.reached, slot + 1.0)
        return slots or self._probe(slot, is_ready)

    def _probe(self, reachable: int, is_ready: Callable[[int], bool]) -> list[int]:
        """The last slot that is ready, once rounds of the log have passed without an offer, if it lies before the first
        `reachable` one: a learner that was away for a while has slots in reach, and needs no probe."""
        rounds = (self.head - self.next_slot) / self.num_fragments
        if self.delivery.waiting or rounds < self._probe_rounds:
            return []
        slot = next((slot for slot in range(self._furthest, self.head - 1, -1) if is_ready(slot)), None)
        if slot is None or slot >= reachable:
            return []
        self._probed, self._probe_rounds = slot, PROBE_AGAIN_ROUNDS
        self._take(slot)
        return [slot]

    def _take(self, slot: int) -> None:
        """The next offer names this slot."""
        self.passed += slot - self.next_slot
        self.next_slot, self.unsent = slot + 1, 0.0

    def _is_due(self, slot: int, now_s: float, step_s: float) -> bool:
        """Whether a slot is due, by steps or by the clock. It is not while it is too far ahead of the head, or while
        earlier offers need longer than a step to upload: an offer that waits long would merge old progress."""
        missed_a_round = slot >= self.next_slot + self.num_fragments  # then the syncer waits for this learner no more
        made = max(self.reached - slot, self.unsent if missed_a_round else 0.0)  # other learners may always be faster
        has_reached = made >= 1 - 1e-6
        if slot > self._furthest:
            return False
        opens_s, way_s = self.opens_s(slot, now_s), self.delivery.expected_s(now_s)
        if self.delivery.free_s > now_s + step_s:
            return False
        if self.window is None or opens_s == -inf:
            return has_reached and slot < self.head + self.num_fragments
        if missed_a_round and slot == self.head and (has_reached or self._stands_still(now_s)):
            return True  # where all learners that the syncer expects come early, it merges long before a window begins
        if has_reached and opens_s - way_s <= now_s + max(step_s, self._early_slots * self.window.slot_s):
            return True
        late = 1.0 if self.pace == "planned" and not missed_a_round else TOLERATED
        return self.closes_s(slot, now_s) < inf and opens_s + late * self.window.grace_s - way_s < now_s + step_s

    @property
    def _early_slots(self) -> float:
        is_tight = self.window is not None and (self.window.opens_s <= 0 or self.window.grace_s <= 0)
        return EARLY_WHERE_LATE if is_tight else EARLY

    def first_reachable(self, now_s: float, before: int = 0) -> int:
        """The first slot that an offer can reach if it is sent now, after `before` others. Slots that it cannot reach,
        and slots that the log has passed, are left out. Where it can reach none, a slot that is far enough ahead to be
        beyond what its base allows."""
        first = max(self.next_slot, self.head)
        arrives_s = now_s + self.delivery.expected_s(now_s, before)
        if self.window is None or arrives_s <= self.closes_s(first, now_s):
            return first
        missed = (arrives_s - self._planned_s(first, now_s) - self.window.grace_s) / self.window.slot_s
        if self._spacing_s > 0:
            missed = min(missed, (arrives_s - self._merges_from_s(first)) / self._spacing_s)
        return first + min(ceil(missed + 1e-9), self.max_ahead)

    @property
    def _furthest(self) -> int:
        """The last slot that an offer may name: its base, produced in the slot before the head at the latest, is too
        old for any slot after it."""
        return self.head + self.max_ahead - 1
