"""Which reports a syncer merges: one slot after the other, every decision by the product's own functions.

This is the paper's form, without numbered slots: a report names no slot and counts for the one that is due when it
comes. A report that misses a window opens the next slot, and at K = 1 it is that slot's quorum. So if the reports of
many learners are spread over a step, there are more merges than a learner has steps, with fewer participants each.
Through a bucket an offer is made for a slot and counts for no other, and a slot's window does not begin before its time
(`protocol.rules.quorum.Watch`); that is what `simulate run` shows.

A slot whose inputs, relative to its first report, equal an earlier slot's has the same outcome, because the decision is
pure: so outcomes are remembered. Without the memory every slot is decided anew, which is slower, with equal results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import ceil, inf
from typing import Literal

import numpy as np

from diloco_cli.forecast.chips import FAR_MS, MS, Timeline
from diloco_cli.protocol.rules.quorum import (
    Pace,
    Watch,
    alive_within_s,
    decide_slot,
    grace_window,
    measured_pace,
    patience_s,
)

BLOCK = 1 << 16
MAX_REMEMBERED = 4_000_000  # times in the inputs of all outcomes; then the memory starts anew


@dataclass(frozen=True)
class MergeRules:
    """As in run.yaml: K, tau, gamma. `sync_s`: to upload, merge and adopt a fragment. `drift_s`: how long learners step
    on while the quorum is missing; it affects which steps count (`presence`), not the merges."""

    quorum: int = 1
    overlap: int | Literal["auto"] = 2
    gamma: float = 0.5
    sync_s: float = 1.0
    skip_after_s: float = 60.0
    drift_s: float = inf


@dataclass(frozen=True)
class SlotView:
    """A slot's inputs in milliseconds after its first report. `reports[m]`: learner m's next one, `FAR_MS`: not in this
    slot; `alive_until[m]`: until when its last one keeps it alive; `opened`: when the slot became due (0 or before)."""

    reports: tuple[int, ...]
    alive_until: tuple[int, ...]
    opened: int
    slot_ms: int
    pace: Pace


@dataclass(frozen=True)
class SlotResult:
    """What the syncer does, `at_ms` after the slot's first report, and its averages from then on."""

    action: Literal["merge", "skip"]
    at_ms: int
    participants: tuple[int, ...]
    alive: int
    pace: Pace

    @cached_property
    def bits(self) -> int:
        return sum(1 << m for m in self.participants)

    @cached_property
    def share(self) -> float:
        """Participants / learners alive."""
        return len(self.participants) / max(self.alive, len(self.participants))


def decide(view: SlotView, rules: MergeRules) -> SlotResult:
    """Ask the syncer's own functions at every moment at which their answer can change."""
    grace = grace_window(rules.overlap, view.pace, rules.gamma)
    watch = Watch(view.opened / MS)
    skip_after_s = patience_s(rules.skip_after_s, view.pace.slot_s)
    skip_ms = max(0, view.opened + round(skip_after_s * MS))  # in seconds that may be a rounding too early
    gone = (until_ms + 1 for until_ms in view.alive_until if until_ms >= 0)
    moments = sorted({0, view.slot_ms, skip_ms, skip_ms + 1, *view.reports, *gone})
    while True:
        now_ms = moments.pop(0)
        present = tuple(m for m, at_ms in enumerate(view.reports) if at_ms <= now_ms)
        pairs = zip(view.reports, view.alive_until, strict=True)
        alive = sum(at_ms <= now_ms or until_ms >= now_ms for at_ms, until_ms in pairs)
        later_offers = now_ms >= view.slot_ms  # the learner that reported first has reached its next slot by then
        facts = watch.look(len(present), alive, rules.quorum, later_offers, now_ms / MS)
        decision = decide_slot(facts, grace, skip_after_s)
        if decision.action == "merge":
            pace = measured_pace(view.pace, view.slot_ms / MS, watch.enough_s or 0.0, rules.sync_s)
            return SlotResult("merge", now_ms, present, alive, pace)
        if decision.action == "skip":
            return SlotResult("skip", now_ms, present, alive, view.pace)
        if decision.until_s is not None:
            moments = sorted({*moments, max(now_ms + 1, ceil(decision.until_s * MS))})


@dataclass
class Merges:
    """The merges of a history. `at_ms[k]` and `present[k]` (a bit per learner): merge k."""

    at_ms: list[int] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    skips: int = 0
    shares: float = 0.0
    decided: int = 0

    @property
    def participation(self) -> float:
        """Mean over merges of participants / learners alive."""
        return self.shares / len(self.at_ms) if self.at_ms else 0.0


def merge_all(timelines: Sequence[Timeline], rules: MergeRules, memory: SlotMemory) -> Merges:
    """Every slot of a history. Learners' steps do not depend on merges, so their timelines are known beforehand. The
    machines are not synchronised: learner m's steps end m / M of a step later than learner 0's. A learner reports each
    of its steps. `memory` serves any number of histories with the same rules."""
    slot_ms = min(t.learner.step_ms for t in timelines)
    memory.serve(rules, slot_ms)
    phases_ms = [t.learner.step_ms * m // len(timelines) for m, t in enumerate(timelines)]
    sources = [chain.from_iterable(step_ends_ms(t, late)) for t, late in zip(timelines, phases_ms, strict=True)]
    made = Merges()
    upcoming = [next(source, FAR_MS) for source in sources]
    heard = [0] * len(sources)
    decided = memory.decided
    opened_ms, pace = 0, memory.same_pace(Pace(slot_ms / MS, 0.0, rules.sync_s))
    while (first_ms := min(upcoming)) < FAR_MS:
        outcome = memory.outcome(upcoming, heard, first_ms, opened_ms, pace)
        opened_ms, pace = first_ms + outcome.at_ms, outcome.pace
        for m in outcome.participants:
            at_ms, source = upcoming[m], sources[m]
            while at_ms <= opened_ms:
                heard[m] = at_ms
                at_ms = next(source, FAR_MS)
            upcoming[m] = at_ms
        if outcome.action == "skip":
            made.skips += 1
            continue
        made.at_ms.append(opened_ms)
        made.present.append(outcome.bits)
        made.shares += outcome.share
    made.decided = memory.decided - decided
    return made


class SlotMemory:
    """Outcomes by inputs: those of the slot before, then the very same inputs in an earlier slot, then inputs that
    differ from an earlier slot's only where it makes no difference. `remember` False: every slot is decided anew."""

    def __init__(self, remember: bool = True) -> None:
        self.remember = remember
        self.decided = 0
        self.rules, self.slot_ms = MergeRules(), 0
        self._last_inputs: object = None
        self._last: SlotResult | None = None
        self._same: dict[object, SlotResult] = {}
        self._alike: dict[SlotView, SlotResult] = {}
        self._paces: dict[Pace, Pace] = {}

    def serve(self, rules: MergeRules, slot_ms: int) -> None:
        """From now on decide by these rules; outcomes of other rules are forgotten."""
        if (rules, slot_ms) != (self.rules, self.slot_ms):
            self._forget()
        self.rules, self.slot_ms = rules, slot_ms
        self._last = self._last_inputs = None

    def outcome(self, upcoming: list[int], heard: list[int], first_ms: int, opened_ms: int, pace: Pace) -> SlotResult:
        if not self.remember:
            return self._decide(self._view(upcoming, heard, first_ms, opened_ms, pace))
        waited_ms = first_ms - opened_ms if self.rules.quorum > 1 else 0
        inputs = ([at - first_ms for at in upcoming], [first_ms - at for at in heard], waited_ms, id(pace))
        if self._last is not None and inputs == self._last_inputs:
            return self._last
        key = (*inputs[0], *inputs[1], *inputs[2:])
        found = self._same.get(key)
        if found is None:
            if len(self._same) * len(key) >= MAX_REMEMBERED:
                self._forget()
                self.same_pace(pace)
            found = self._decide_alike(self._view(upcoming, heard, first_ms, opened_ms, pace))
            self._same[key] = found
        self._last_inputs, self._last = inputs, found
        return found

    def _decide_alike(self, view: SlotView) -> SlotResult:
        found = self._alike.get(view)
        if found is None:
            made = self._decide(view)
            found = self._alike[view] = replace(made, pace=self.same_pace(made.pace))
        return found

    def same_pace(self, pace: Pace) -> Pace:
        """Equal averages as one object that stays as long as the outcomes: its id is part of their keys."""
        return self._paces.setdefault(pace, pace)

    def _forget(self) -> None:
        self._same, self._alike, self._paces = {}, {}, {}

    def _decide(self, view: SlotView) -> SlotResult:
        self.decided += 1
        return decide(view, self.rules)

    def _view(self, upcoming: list[int], heard: list[int], first_ms: int, opened_ms: int, pace: Pace) -> SlotView:
        """The slot's inputs, without those after the last moment at which the slot can end: they make no difference."""
        skip_ms = round(patience_s(self.rules.skip_after_s, pace.slot_s) * MS)
        last_ms = self.slot_ms if self.rules.quorum == 1 else max(self.slot_ms, skip_ms) + self.slot_ms
        alive_ms = round(alive_within_s(pace) * MS) - first_ms
        cut_ms = first_ms + last_ms
        return SlotView(
            reports=tuple([at - first_ms if at <= cut_ms else FAR_MS for at in upcoming]),
            alive_until=tuple([min(max(-1, at + alive_ms), last_ms) for at in heard]),
            opened=0 if self.rules.quorum == 1 else max(opened_ms - first_ms, -skip_ms),
            slot_ms=self.slot_ms,
            pace=pace,
        )


def step_ends_ms(timeline: Timeline, later_ms: int = 0) -> Iterator[list[int]]:
    """Blocks of the ends of every finished step, in order, each so much later."""
    until = np.cumsum(timeline.steps)  # stretch i ends before this step of the history
    total = int(until[-1]) if len(until) else 0
    for first in range(0, total, BLOCK):
        number = np.arange(first, min(first + BLOCK, total))
        stretch = np.searchsorted(until, number, side="right")
        ordinal = number - (until - timeline.steps)[stretch] + 1
        yield (timeline.start_ms[stretch] + ordinal * timeline.learner.step_ms + later_ms).tolist()
