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
from math import inf
from statistics import median_low

from diloco_cli.protocol.state import RunState, Window

TAKEN = 16  # the newest offers, whose time on their way is remembered
DEVIATIONS = 2.0  # of that time, beyond its median, that are reckoned with
HIDDEN_STEP = 0.5  # of a slot, that one offer more on its way is allowed after it came late
HIDDEN_LESS = 0.02  # of a slot, after each offer that was merged: the way may have become shorter
TOLERATED = 0.25  # of the grace, that an offer may come after its window began: learners' times are never exact
STALLED = 1.0  # slots beyond its time without the next commit: the log stands still, and the slot that is due is open
EARLY = 1.0  # slots, or one step, that an offer may come before its window begins
MOST_PASSED = 4096  # slots in one go: beyond that something is wrong with a clock


@dataclass
class Delivery:
    """How long an upload takes: its median and median deviation, for one hiccup says nothing of the next; and what is
    hidden of its way."""

    measured_s: float = 0.0
    hidden_s: float = 0.0
    _taken_s: deque[float] = field(default_factory=lambda: deque(maxlen=TAKEN))

    def expected_s(self, queued: int) -> float:
        """From sending an offer until the syncer has it, while so many others wait before it."""
        return (queued + 1) * self.measured_s + self.hidden_s

    def took(self, seconds: float) -> None:
        self._taken_s.append(seconds)
        middle_s = median_low(self._taken_s)
        self.measured_s = middle_s + DEVIATIONS * median_low(abs(taken_s - middle_s) for taken_s in self._taken_s)


@dataclass
class Shot:
    """One offer on its way to its slot: when that slot's window closes, whether this incarnation was known to the
    syncer when it was sent (before, nobody looks for its offers), and when it arrived as far as can be seen."""

    closes_s: float
    known: bool
    arrived_s: float | None = None


@dataclass
class Aim:
    """Of one incarnation. `next_slot`: the first that it has neither offered for nor passed by. `reached`: where on the
    line of slots its own steps have brought it; slot s is due from s + 1 on. `early`: so that nobody waits for it.
    `closes`: False where no merge goes on without this learner, and so no offer is ever too late."""

    num_fragments: int
    head: int
    early: bool = True
    closes: bool = True
    window: Window | None = None
    head_since_s: float = -inf
    skipped: bool = False
    delivery: Delivery = field(default_factory=Delivery)
    next_slot: int = 0
    reached: float = 0.0
    passed: int = 0
    known: bool = False
    _shots: dict[int, Shot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_slot, self.reached = self.head, float(self.head)

    # -- what happens -------------------------------------------------------------------------------------------

    def stepped(self, local_steps: float) -> None:
        self.reached += self.num_fragments / local_steps

    def heard(self, state: RunState, since_s: float, now_s: float) -> None:
        """A newer head: it appeared after `since_s`, when it was not there yet, and is there now."""
        advanced = state.slot - self.head
        if advanced > 0:
            slot_s = 0.0 if self.window is None else self.window.slot_s
            expected_s = self.head_since_s + advanced * slot_s
            self.head_since_s = min(max(since_s, expected_s), now_s)
            self.skipped = all(output.slot < state.slot - 1 for output in state.outputs)
        self.head, self.window = state.slot, state.window

    def rolled_back(self, head: int) -> None:
        self.next_slot, self.reached = head, float(head)
        self._shots.clear()

    def sent(self, slot: int, now_s: float) -> None:
        self._shots[slot] = Shot(self.closes_s(slot, now_s), self.known)

    def delivered(self, slot: int, seconds: float, now_s: float) -> None:
        """Its upload took so long, and has just ended."""
        self.delivery.took(seconds)
        if (shot := self._shots.get(slot)) is not None:
            shot.arrived_s = now_s

    def settled(self, slot: int, in_time: bool | None) -> None:
        """The outcome of the offer for this slot, as far as its way decided it; None: it did not."""
        shot = self._shots.pop(slot, None)
        if in_time is None:
            return
        slot_s = 0.0 if self.window is None else self.window.slot_s
        if in_time:
            self.delivery.hidden_s = max(0.0, self.delivery.hidden_s - HIDDEN_LESS * slot_s)
        elif shot is not None and shot.known and shot.arrived_s is not None and shot.arrived_s <= shot.closes_s < inf:
            more_s = max(self.delivery.hidden_s, shot.closes_s - shot.arrived_s) + HIDDEN_STEP * slot_s
            self.delivery.hidden_s = min(more_s, self.num_fragments * slot_s)

    # -- what follows -------------------------------------------------------------------------------------------

    def closes_s(self, slot: int, now_s: float) -> float:
        """When the window of a slot closes, at the earliest; `inf` where nothing is known of it yet, and for the slot
        that is due while the log stands still, or after one was skipped: then too few are there, and all have to meet
        in the same slot."""
        if self.window is None or self.window.slot_s <= 0 or not self.closes:
            return inf
        slot_s, ahead = self.window.slot_s, slot - self.head
        first_s = self.head_since_s + self.window.opens_s + self.window.grace_s
        if now_s <= first_s + STALLED * slot_s and not self.skipped:
            return first_s + ahead * slot_s
        return inf if ahead == 0 else now_s + self.window.grace_s + ahead * slot_s

    def latest_s(self, slot: int, now_s: float, queued: int = 0) -> float:
        """Until when an offer for the slot can be sent, while so many others wait to be uploaded."""
        return self.closes_s(slot, now_s) - self.delivery.expected_s(queued)

    def best_s(self, slot: int, now_s: float) -> float:
        """Until when it is best sent, so that it is not waited for."""
        grace_s = 0.0 if self.window is None else self.window.grace_s
        return self.latest_s(slot, now_s) - (1.0 - TOLERATED) * grace_s

    def due(
        self, now_s: float, step_s: float, queued: int = 0, is_ready: Callable[[int], bool] = lambda slot: True
    ) -> list[int]:
        """The slots to offer for after this step. `step_s`: how long the next one takes; `queued`: so many offers wait
        to be uploaded. A slot that is not ready yet holds up those after it, for as long as it can still be reached:
        in everybody's eyes it is passed by once there is an offer for a later one."""
        self._pass_by(now_s, queued)
        slots: list[int] = []
        while self._is_due(now_s, step_s) and self.latest_s(self.next_slot, now_s, queued + len(slots)) >= now_s:
            if len(slots) == self.num_fragments or not is_ready(self.next_slot):
                self.reached = float(self.next_slot)  # what it is made of counts from there
                break
            slots.append(self.next_slot)
            self.next_slot += 1
            self.reached = max(self.reached, float(self.next_slot))
        self.reached = min(self.reached, self.next_slot + 1.0)
        return slots

    def _is_due(self, now_s: float, step_s: float) -> bool:
        """By its steps, unless it is that far ahead of the others: an offer that lies there for long would merge old
        progress. Or by the clock."""
        best_s = self.best_s(self.next_slot, now_s)
        if best_s == inf:
            ahead = self.next_slot < self.head + self.num_fragments or not self.closes
            return ahead and self.reached >= self.next_slot + 1 - 1e-6
        slot_s = 0.0 if self.window is None else self.window.slot_s
        by_steps = self.reached >= self.next_slot + 1 - 1e-6 and best_s <= now_s + max(step_s, EARLY * slot_s)
        until_s = best_s if self.early else self.latest_s(self.next_slot, now_s)
        return by_steps or until_s < now_s + step_s

    def _pass_by(self, now_s: float, queued: int) -> None:
        """What the log has passed, and what an offer cannot reach any more."""
        first = self.first_reachable(now_s, queued, max(self.next_slot, self.head))
        self.passed += first - self.next_slot
        self.next_slot = first
        self.reached = max(self.reached, float(first))

    def first_reachable(self, now_s: float, queued: int, first: int | None = None) -> int:
        """The first slot, from `first` or the log's head on, that an offer sent now can reach."""
        slot = self.head if first is None else first
        while self.latest_s(slot, now_s, queued) < now_s and slot < self.head + MOST_PASSED:
            slot += 1
        return slot
