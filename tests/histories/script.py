"""The faults of a history and their times: drawn from a seed during the history, or a given list of any faults.
The result of a history, and the classes that it is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_cli.protocol.actors.standby import Standby
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.keys import SYNCER
from diloco_cli.protocol.log.operations import Create, Delete, Get, Operation, Put, There
from diloco_cli.protocol.regions import Mirror, Relay
from tests.faulty_world import OF_READ_BACK, OF_READS, Fault, Injected
from tests.histories.client import Client
from tests.histories.integers import IntegerArithmetic
from tests.histories.learner import SimulatedLearner
from tests.histories.options import SLOW_LINK, NemesisKind, Options
from tests.histories.replayer import ViolationError
from tests.histories.stream import Stream

MAX_LATE_S = (0.05, 0.5, 2.0, 20.0)
MAX_PAUSE_S = (0.1, 0.5, 2.0, 10.0)
SLOW_WITHIN = 0.2  # of the fault phase: one link becomes slow in it, and stays so
TRANSFER_SHARES = (0.5, 2.0)  # of the time within which an offer can be of use: what a large object takes there
MAX_AWAY_S = (0.1, 0.5, 1.0, 2.0, 5.0, 20.0)
OF_PROCESSES = frozenset({
    "kill", "pause", "zombie", "outage", "forbidden", "full", "wall_jump", "rotate", "steal", "notice",
})  # fmt: skip
WHICH = (0, 1, 1, 2, 3)  # of a role's processes; 0: all
OF_LEARNERS = frozenset({"leave", "partial", "poison", "huge", "corrupt", "unfit", "readmit", "harm"})
CHECKED = (  # bytes that may come damaged
    "delta/", "state/", "weights/", "snapshot/", "hint/", "commit/", "offer/", "request/", "incarnation/",
    "join/",
)  # fmt: skip
READ_BACK = ("state/", "weights/", "delta/")  # may be stored in part; a create of any other key is atomic
LARGE = (*READ_BACK, "inner/")  # objects that take long on a slow link; all others are records
WRITES = frozenset({Create, Put, Delete})
_SECONDS_BITS = 10


@dataclass(frozen=True)
class CallFault:
    """A fault of one call: of operation `number` of an actor."""

    actor: str
    operation: int
    fault: Injected

    def describe(self) -> str:
        unit = "of its length on" if self.fault.kind is Fault.FLIPPED else "s"
        extra = f" ({self.fault.seconds:.2f} {unit})" if self.fault.seconds else ""
        return f"{self.actor}, operation {self.operation}: {self.fault.kind.value}{extra}"


@dataclass(frozen=True)
class NemesisEvent:
    """An event at a time that hits a role (a learner's name, or `syncer`): all its processes, or the `which`-th of
    those alive then, counted from 1 and wrapping round. A wall clock jumps back if `for_s` is below 0. A slow link
    stays slow until faults cease; there `for_s` is the time that a large object takes."""

    at_s: float
    kind: NemesisKind
    target: str
    for_s: float
    which: int = 0

    def describe(self) -> str:
        which = f", process {self.which} of the living" if self.which else ""
        return f"at {self.at_s:.3f} s: {self.kind} {self.target}{which} ({self.for_s:.2f} s)"


@dataclass(frozen=True)
class Script:
    """Faults to inject, and no others."""

    calls: tuple[CallFault, ...] = ()
    nemesis_events: tuple[NemesisEvent, ...] = ()

    def __len__(self) -> int:
        return len(self.calls) + len(self.nemesis_events)

    def kept(self, places: Sequence[int]) -> Script:
        """With these faults only, by their place: calls first, then the events."""
        faults = [*self.calls, *self.nemesis_events]
        chosen = [faults[place] for place in places]
        calls = tuple(fault for fault in chosen if isinstance(fault, CallFault))
        return Script(calls, tuple(fault for fault in chosen if isinstance(fault, NemesisEvent)))


def drawn_nemesis_events(options: Options, seed: int, names: Sequence[str]) -> tuple[NemesisEvent, ...]:
    """Events in the first part of the fault phase, in which the run has certainly not ended."""
    draw, found = Stream(seed, "disturbances"), []  # the label is part of what a seed means
    span_s = options.faulty_share * options.merges * options.slot_s
    for kind in options.nemesis_events:
        if kind == SLOW_LINK:
            at_s, for_s = draw.between(0.0, SLOW_WITHIN * span_s), draw.between(*TRANSFER_SHARES) * options.reach_s
            found.append(NemesisEvent(round(at_s, 6), kind, draw.choice(names), round(for_s, 6)))
            continue
        for _ in range(draw.whole(1, 3)):
            of_syncer = draw.chance(0.7 if kind == "notice" else 0.4) and kind not in OF_LEARNERS
            target = SYNCER if of_syncer else draw.choice(names)
            at_s, for_s = draw.between(0.0, span_s), draw.choice(MAX_AWAY_S) * draw.uniform()
            which = draw.choice(WHICH) if kind in OF_PROCESSES else 0
            for_s *= draw.choice((-1, 1)) if kind == "wall_jump" else 1
            found.append(NemesisEvent(round(at_s, 6), kind, target, round(for_s, 6), which))
    return tuple(sorted(found, key=lambda event: event.at_s))


@dataclass
class CallFaults:
    """Decides for every call whether a fault hits it. `struck`: the faults that did, in their order."""

    options: Options
    given: dict[tuple[str, int], Injected] | None
    struck: list[CallFault] = field(default_factory=list)

    def __post_init__(self) -> None:
        kinds = [kind for kind in self.options.calls if kind is not Fault.FULL]
        self._of_versions = [kind for kind in self.options.calls if kind not in OF_READS]
        self._of_writes = [kind for kind in self._of_versions if kind not in OF_READ_BACK]
        self._of_payloads = [kind for kind in kinds if kind not in OF_READ_BACK]
        self._of_reads = [kind for kind in self._of_payloads if kind not in OF_READS]
        self._most = max(self.options.write_rate, self.options.read_rate)

    def strike(self, actor: str, number: int, operation: Operation, draw: float) -> Injected | None:
        """`draw`: a number of this call's own, in [0, 1)."""
        if self.given is not None:
            fault = self.given.get((actor, number))
        else:
            fault = self._drawn(operation, draw) if draw < self._most else None
        if fault is not None:
            self.struck.append(CallFault(actor, number, fault))
        return fault

    def _drawn(self, operation: Operation, draw: float) -> Injected | None:
        there = type(operation) is There
        operation = operation.operation if isinstance(operation, There) else operation
        writes = type(operation) in WRITES
        rate = self.options.write_rate if writes else self.options.read_rate
        if draw >= rate:
            return None
        kinds = self._of_writes if writes and there else self._kinds(operation, writes)
        if not kinds:
            return None
        which, bits = divmod(int(draw / rate * (len(kinds) << _SECONDS_BITS)), 1 << _SECONDS_BITS)
        return Injected(kinds[which], round(_seconds(kinds[which], bits), 6))

    def _kinds(self, operation: Operation, writes: bool) -> Sequence[Fault]:
        """The kinds of faults that can hit such a call."""
        if writes:
            halves = isinstance(operation, Create) and operation.key.startswith(READ_BACK)
            return self._of_versions if halves else self._of_writes
        checked = isinstance(operation, Get) and operation.key.startswith(CHECKED)
        return self._of_payloads if checked else self._of_reads


def _seconds(kind: Fault, bits: int) -> float:
    """The delay of a fault in seconds, or the place of a flipped bit."""
    scale, share = bits & 3, (bits >> 2 & 0xFF) / 256
    if kind in (Fault.LATE, Fault.CRASH_LATE, Fault.SLOW):
        return MAX_LATE_S[scale] * (share + 0.01)
    if kind is Fault.FLIPPED:
        return bits / (1 << _SECONDS_BITS)
    if kind is Fault.TWICE:
        return MAX_LATE_S[scale] * share if scale else 0.0
    return MAX_PAUSE_S[scale] * (share + 0.01) if kind is Fault.PAUSE else 0.0


Moment = tuple[float, str, str]  # when (seconds), what, and the key of what was created, if it was


@dataclass(frozen=True)
class Actors:
    """The classes that a history is made of. Tests hand in faulty ones to see that errors are found."""

    syncer: type[Syncer] = Syncer
    standby: type[Standby] = Standby
    mirror: type[Mirror] = Mirror
    relay: type[Relay] = Relay
    learner: type[SimulatedLearner] = SimulatedLearner
    client: type[Client] = Client
    arithmetic: type[IntegerArithmetic] = IntegerArithmetic


@dataclass
class HistoryResult:
    """The result of a history. `lost_tokens`: those lost with processes that ended, of all `processed_tokens`, in the
    fragment that lost most. `tail`: the events to report, in their order; `objects`: the final objects of the bucket,
    and under `apart/` those of the region's, if there is one."""

    commits: int = 0
    crashes: int = 0
    operations: int = 0
    faulty: Script = field(default_factory=Script)
    violation: ViolationError | None = None
    tail: list[Moment] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[bytes] = field(default_factory=list)
    processed_tokens: int = 0
    lost_tokens: int = 0
    per_actor: Counter[str] = field(default_factory=Counter)
