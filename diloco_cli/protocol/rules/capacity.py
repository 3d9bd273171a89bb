"""How large a run one syncer carries: the shortest slot that it can hold, and what limits it. The formula, and why its
terms add up, are in ARCHITECTURE.md ("How large a run one syncer carries"). `turns(n)`: calls go in portions of 48,
each of which takes ceil(48 / connections) round trips, and the last one as many as its rest needs. `measured_machine`
is that of a syncer that measures itself (runtime/daemon.py). Pure; `plan`, `simulate run` and `status` use it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

from diloco_cli.formulas import formula
from diloco_cli.protocol.log.operations import MAX_AT_ONCE
from diloco_cli.protocol.rules.pacing import requests_every_s, watch_every_s

Limit = Literal["calls", "bytes", "processor"]
WRITTEN = 2  # objects of a version: state and weights
REQUEST_CALLS = 2  # in turn, when it looks for operators' requests and for a successor
HEARTBEAT_EVERY_S = 3.0
MAX_LEARNERS = 1 << 16
BITS = 8.0
ENOUGH_ROUNDS = 1000  # of an iteration that adds a smaller part each time
EXACT = 1e-9


@dataclass(frozen=True)
class SyncerMachine:
    """A syncer's machine: seconds of a call to the store, its own link (None: unknown, fast enough), how many
    parameters of one learner it merges in a second, whether it reads back what it has written (store/url.py), and how
    many calls it makes at a time, MAX_AT_ONCE at most."""

    call_s: float
    up_bps: float | None
    down_bps: float | None
    parameters_per_s: float
    reads_back: bool = True
    connections: int = MAX_AT_ONCE


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
        return merging_s(self.calls_s, self.bytes_s, self.processor_s)

    @property
    def limit(self) -> Limit:
        """What takes most of them."""
        parts: dict[Limit, float] = {"calls": self.calls_s, "bytes": self.bytes_s, "processor": self.processor_s}
        return max(parts, key=lambda name: parts[name])


@formula("schedule", "merging", "s")
def merging_s(calls_s: float, bytes_s: float, processor_s: float) -> float:
    return calls_s + bytes_s + processor_s


def turns(calls: int, connections: int) -> int:
    """How many round trips calls take that do not depend on each other: they go in portions of MAX_AT_ONCE, each over
    so many connections."""
    portions, rest = divmod(calls, MAX_AT_ONCE)
    return portions * ceil(MAX_AT_ONCE / connections) + ceil(rest / connections)


def calls_of_merge(learners: int, machine: SyncerMachine) -> int:
    """Calls in turn, from the first offer that is found to the commit."""
    found, behind, written = (turns(n, machine.connections) for n in (learners, 2 * learners, WRITTEN))
    return found + behind + written * (1 + machine.reads_back) + 1


def merge_time(work: MergeWork, machine: SyncerMachine) -> SlotTime:
    """One merge, from the first offer that is found to the commit. A rate that is not known costs nothing."""
    calls = calls_of_merge(work.learners, machine)
    return SlotTime(
        calls_s(calls, machine.call_s),
        bytes_s(
            work.learners,
            work.delta_bytes,
            work.version_bytes,
            machine.reads_back,
            machine.down_bps or inf,
            machine.up_bps or inf,
        ),
        processor_s(work.learners, work.parameters, machine.parameters_per_s),
    )


@formula("schedule", "calls of a merge", "s")
def calls_s(calls_in_turn: int, call_s: float) -> float:
    return calls_in_turn * call_s


@formula("schedule", "bytes of a merge", "s")
def bytes_s(
    islands: int, delta_bytes: float, version_bytes: float, reads_back: bool, down_bps: float, up_bps: float
) -> float:
    read_bytes = islands * delta_bytes + reads_back * version_bytes
    return BITS * read_bytes / down_bps + BITS * version_bytes / up_bps


@formula("schedule", "arithmetic of a merge", "s")
def processor_s(islands: int, parameters: float, parameters_per_s: float) -> float:
    return islands * parameters / parameters_per_s


def measured_machine(
    work: MergeWork, call_s: float, bytes_s: float, processor_s: float, reads_back: bool, connections: int
) -> SyncerMachine:
    """The machine that takes so long for a call, and for a merge's bytes and its arithmetic. Its link is taken to be as
    fast up as down."""
    bits = BITS * (work.learners * work.delta_bytes + (1 + reads_back) * work.version_bytes)
    bps = bits / bytes_s if bytes_s else None
    parameters_per_s = work.learners * work.parameters / processor_s if processor_s else inf
    return SyncerMachine(call_s, bps, bps, parameters_per_s, reads_back, connections)


def shortest_slot(work: MergeWork, machine: SyncerMachine, slot_s: float) -> SlotTime:
    """What the shortest slot that this syncer can hold is spent on: a merge, and the calls that it makes now and then
    beside it: heartbeats, looks for operators' requests, for a successor, for new incarnations. Each is made at the end
    of the first turn after it is due, so the longer the turns, the fewer of them. `slot_s`: the learners' slot, by
    which it chooses how often it looks for what comes rarely."""
    merge = merge_time(work, machine)
    look = turns(work.learners, machine.connections)  # for new incarnations
    seconds, upkeep_s = merge.seconds, 0.0
    for _ in range(ENOUGH_ROUNDS):
        before_s, upkeep_s = upkeep_s, machine.call_s * _upkeep_calls(look, seconds, slot_s)
        seconds = merge.seconds + upkeep_s
        if upkeep_s - before_s <= EXACT * seconds:
            break
    return replace(merge, calls_s=merge.calls_s + upkeep_s)


def _upkeep_calls(look: int, seconds: float, slot_s: float) -> float:
    """In turn, in a turn of so many seconds, in the mean; `look`: those of one look for new incarnations."""
    requests = REQUEST_CALLS * _due(requests_every_s(slot_s), seconds)
    incarnations = look * _due(watch_every_s(slot_s), seconds)
    return requests + incarnations + _due(HEARTBEAT_EVERY_S, seconds)


def _due(every_s: float, seconds: float) -> float:
    """The share of turns of so many seconds in which something is due that comes each `every_s`, at a turn's end."""
    return 1 / max(1, ceil(every_s / seconds)) if seconds > 0 else 1.0


def most_learners(work: MergeWork, machine: SyncerMachine, slot_s: float, at_most: int = MAX_LEARNERS) -> int:
    """The largest M up to `at_most` whose merges keep to this slot; 0 if not even one learner's do."""

    def holds(learners: int) -> bool:
        return shortest_slot(replace(work, learners=learners), machine, slot_s).seconds <= slot_s

    if holds(at_most):
        return at_most
    low, high = 0, at_most  # holds(low), not holds(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
