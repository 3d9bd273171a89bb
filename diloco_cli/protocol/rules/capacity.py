"""How large a run one syncer carries: the shortest slot that it can hold, and what limits it.

A syncer serves one slot after the other. For a merge of M learners' deltas it needs, beside what it does now and then,

    calls       (ceil(M / 48) + ceil(2 M / 48) + 2) x a round trip      offers are found; the next ones looked for and
                                payloads read; state and weights are written; the commit
    bytes       M deltas / down + a version / up                        a version: state and weights
    read back   1 round trip + a version / down                         where the store does not check uploads itself
    processor   M x parameters of a fragment / parameters of one learner merged a second

and these add up, since none of it is done beside another where the syncer is behind. `SlotTime` is also what a syncer
has measured of itself (runtime/spending.py). Pure; `plan`, `simulate run` and `status` use it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from diloco_cli.protocol.log.together import MAX_AT_ONCE
from diloco_cli.protocol.rules.polling import requests_every_s, watch_every_s

Limit = Literal["calls", "bytes", "processor"]
CALLS_OF_A_MERGE = 2
REQUEST_CALLS = 2  # in turn, when it looks for operators' requests and for a successor
HEARTBEAT_EVERY_S = 3.0
MAX_LEARNERS = 1 << 16
BITS = 8.0
ENOUGH_ROUNDS = 1000  # of an iteration that adds a smaller part each time
EXACT = 1e-9


@dataclass(frozen=True)
class SyncerMachine:
    """A syncer's machine: seconds of a call to the store, its own link (None: unknown, fast enough), how many
    parameters of one learner it merges in a second, and whether it reads back what it has written (store/proof.py)."""

    call_s: float
    up_bps: float | None
    down_bps: float | None
    parameters_per_s: float
    reads_back: bool = True


@dataclass(frozen=True)
class MergeWork:
    """The work of one merge: of `parameters` parameters, from so many learners' deltas. `version_bytes`: of the state
    and the weights together."""

    learners: int
    parameters: float
    delta_bytes: float
    version_bytes: float


@dataclass(frozen=True)
class SlotTime:
    """The seconds that one slot takes a syncer, by what takes them."""

    calls_s: float
    bytes_s: float
    processor_s: float

    @property
    def seconds(self) -> float:
        return self.calls_s + self.bytes_s + self.processor_s

    @property
    def limit(self) -> Limit:
        """What takes most of them."""
        parts: dict[Limit, float] = {"calls": self.calls_s, "bytes": self.bytes_s, "processor": self.processor_s}
        return max(parts, key=lambda name: parts[name])


def calls_of_merge(learners: int, reads_back: bool) -> int:
    """Calls in turn, from the first offer that is found to the commit."""
    found, behind = ceil(learners / MAX_AT_ONCE), ceil(2 * learners / MAX_AT_ONCE)
    return found + behind + CALLS_OF_A_MERGE + reads_back


def merge_time(work: MergeWork, machine: SyncerMachine) -> SlotTime:
    """One merge, from the first offer that is found to the commit."""
    read_bytes = work.learners * work.delta_bytes + machine.reads_back * work.version_bytes
    down = BITS * read_bytes / machine.down_bps if machine.down_bps else 0.0
    up = BITS * work.version_bytes / machine.up_bps if machine.up_bps else 0.0
    processor_s = work.learners * work.parameters / machine.parameters_per_s
    calls = calls_of_merge(work.learners, machine.reads_back)
    return SlotTime(calls * machine.call_s, down + up, processor_s)


def shortest_slot(work: MergeWork, machine: SyncerMachine, slot_s: float) -> SlotTime:
    """What the shortest slot that this syncer can hold is spent on. `slot_s`: the learners' slot, by which it chooses
    how often it looks for what comes rarely."""
    return with_upkeep(merge_time(work, machine), machine.call_s, work.learners, slot_s)


def with_upkeep(merge: SlotTime, call_s: float, learners: int, slot_s: float) -> SlotTime:
    """A merge and the calls that a syncer makes now and then beside it: heartbeats, looks for operators' requests, for
    a successor, for new incarnations. Each is made at the end of the first turn after it is due, so the longer the
    turns, the fewer of them."""
    seconds, upkeep_s = merge.seconds, 0.0
    for _ in range(ENOUGH_ROUNDS):
        before_s, upkeep_s = upkeep_s, call_s * _upkeep_calls(learners, seconds, slot_s)
        seconds = merge.seconds + upkeep_s
        if upkeep_s - before_s <= EXACT * seconds:
            break
    return replace(merge, calls_s=merge.calls_s + upkeep_s)


def measured_slot(
    call_s: float, bytes_s: float, processor_s: float, reads_back: bool, learners: int, slot_s: float
) -> SlotTime:
    """The shortest slot, of what a syncer measures: a call, and the bytes and the processor of a merge."""
    calls_s = calls_of_merge(learners, reads_back) * call_s
    return with_upkeep(SlotTime(calls_s, bytes_s, processor_s), call_s, learners, slot_s)


def _upkeep_calls(learners: int, seconds: float, slot_s: float) -> float:
    """In turn, in a turn of so many seconds, in the mean."""
    requests = REQUEST_CALLS * _due(requests_every_s(slot_s), seconds)
    incarnations = ceil(learners / MAX_AT_ONCE) * _due(watch_every_s(slot_s), seconds)
    return requests + incarnations + _due(HEARTBEAT_EVERY_S, seconds)


def _due(every_s: float, seconds: float) -> float:
    """The share of turns of so many seconds in which something is due that comes each `every_s`, at a turn's end."""
    return 1 / max(1, ceil(every_s / seconds)) if seconds > 0 else 1.0


def most_learners(work: MergeWork, machine: SyncerMachine, slot_s: float) -> int:
    """The largest M whose merges keep to this slot, MAX_LEARNERS at most; 0 if not even one learner's do."""

    def holds(learners: int) -> bool:
        return shortest_slot(replace(work, learners=learners), machine, slot_s).seconds <= slot_s

    low, high = 0, MAX_LEARNERS + 1  # holds(low), not holds(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
