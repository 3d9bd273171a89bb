"""A whole run in virtual time: the product's syncer and learners on a simulated bucket, under faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count, pairwise
from math import inf
from statistics import median
from typing import Any

from diloco_cli.config.settings import Link
from diloco_cli.errors import DilocoError, FencedError, UsageError
from diloco_cli.faults import FAULTS, SUPERVISOR, SYNCER, Draws, Injection, Unit
from diloco_cli.forecast.stand_ins import (
    Condition,
    NamedPayloads,
    Sizes,
    Stalls,
    SyncerSide,
    TraceArithmetic,
    VirtualLearner,
    VirtualTraining,
)
from diloco_cli.protocol.actors.syncer import NoEvaluator, Syncer
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.operations import Create, Operation, Steps
from diloco_cli.protocol.log.records import Offer, ProcessClaim, RunFormat, encode
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.quantities import format_duration
from diloco_cli.runtime.restart import RestartPolicy
from diloco_cli.signing import OPERATOR
from diloco_cli.store.port import StoreUnavailableError
from diloco_cli.store.retry import pause_s
from diloco_cli.virtual.world import LATENCY_S, Actor, VirtualLanes, World

START = datetime(2000, 1, 1, tzinfo=UTC)  # of the virtual clock: runs in virtual time carry no real date
RESTART_S = 5.0  # of a process that its supervisor starts again, where the run has not shown how long that takes
AT_ONCE_S = 2.0  # starts so close to each other share a machine's cores


@dataclass(frozen=True)
class Hardware:
    """An island's data that a run's format does not have: its own failures (None: none) and how long they last."""

    mtbf_s: float | None = None
    restart_s: float = RESTART_S


@dataclass(frozen=True)
class StartUps:
    """How long units' processes took from their start until they took part, as a run has shown. `seen`: by unit, with
    how many processes had started on that machine at once, since these share its cores."""

    seen: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)

    def of(self, name: str, at_once: int) -> float | None:
        """As it was when most nearly as many started at once; None: this unit has shown none."""
        seen = self.seen.get(name, ())
        nearest = min((abs(number - at_once) for number, _ in seen), default=0)
        return median([s for number, s in seen if abs(number - at_once) == nearest]) if seen else None


def start_ups(started_s: Mapping[str, Sequence[float]], claimed_s: Mapping[str, Sequence[float]]) -> StartUps:
    """From when processes were started, and when units claimed their places: each start counts until the claim that
    comes next, if that is before the unit's next start."""
    everybody = [s for times in started_s.values() for s in times]
    seen: dict[str, list[tuple[int, float]]] = {}
    for name, times in started_s.items():
        for start_s, next_s in pairwise([*sorted(times), inf]):
            claims_s = [s for s in claimed_s.get(name, ()) if start_s < s < next_s]
            if claims_s:
                at_once = sum(abs(s - start_s) <= AT_ONCE_S for s in everybody)
                seen.setdefault(name, []).append((at_once, min(claims_s) - start_s))
    return StartUps(seen)


@dataclass
class SimulatedFleet:
    """All units of one run. The same arguments give the same history, to the byte. `injected`: how many faults
    happened; `without_effect`: those that changed nothing, and why.

    `latency_s`: of the syncer's calls, and of those of islands without an `rtt`; `syncer_link`: that of the syncer's
    machine; `merge_s`: the arithmetic of one merge; `starts`: how long killed units take to come back."""

    run: RunFormat
    sizes: Sizes
    hardware: dict[str, Hardware]
    faults: tuple[Injection, ...] = ()
    seed: int = 0
    merge_s: float = 0.0
    latency_s: float = LATENCY_S
    syncer_link: Link = field(default_factory=Link)
    starts: StartUps = StartUps()
    world: World = field(default_factory=World)
    log: list[str] = field(default_factory=list)
    injected: int = 0
    without_effect: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        refuse_impossible_faults(self.faults)
        self._numbers = count()
        self.conditions = {island.name: Condition(island, self.sizes) for island in self.run.islands}
        self.side = SyncerSide(self.sizes, self.world.store, self.latency_s, self.merge_s, self.syncer_link)
        self.incarnations: dict[str, list[Actor]] = {}
        self.syncers: list[Actor] = []
        self.state = RunState()
        self._down_since_s: dict[str, float] = {}
        self._paused: dict[str, tuple[float, list[Actor]]] = {}  # since when, and which actors
        self._cut_off_until_s: dict[str, float] = {}
        self._full_until_s: dict[str, float] = {}
        self._fails: dict[str, tuple[float, float]] = {}  # until when, and which share of its calls
        self._tries = Draws(self.seed, "tries")
        self._failures = {name: Draws(self.seed, f"failures of {name}") for name in self.conditions}
        self.world.latency_s, self.world.held_until_s = self._latency_s, self._held_until_s
        self.world.on_end = self._ended
        self.world.store.create(FORMAT_KEY, self.run.keyring.sign(OPERATOR, FORMAT_KEY, encode(self.run)))

    # -- a history ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._start_syncer()
        for name in self.conditions:
            self._start_learner(name, 0.0)

    def run_for(self, seconds: float) -> None:
        """Run until the run is over, or `seconds` of virtual time have passed. Raises errors that no fault explains."""
        self.start()
        for fault in self.faults:
            if not fault.skipped:
                self.world.call_at(fault.at_s, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        end_s = self.world.now_s + seconds
        self.world.call_at(end_s, lambda: None)  # so that the world stops at this time
        self.world.run(lambda: self.state.phase == RunPhase.FINISHED or self.world.now_s >= end_s, seconds)
        for name, since_s in self._down_since_s.items():
            self.conditions[name].down_s += self.world.now_s - since_s
        for name in list(self._paused):
            self._book_pause(name)

    def nonce(self) -> str:
        return f"{self.seed & 0xFFFFFFFF:08x}{next(self._numbers):024x}"

    def _claim(self, host: str) -> ProcessClaim:
        return ProcessClaim(0, self.nonce(), host, 1, self._time_text(), self.run.software)

    def _time_text(self) -> str:
        at = datetime.fromtimestamp(START.timestamp() + self.world.now_s, UTC)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    # -- processes ----------------------------------------------------------------------------------------------

    def _run_of_a_process(self) -> RunFormat:
        """It has read nothing yet; what it reads, no other has read."""
        return replace(self.run, kept={})

    def _start_syncer(self, delay_s: float = 0.0) -> None:
        arithmetic = TraceArithmetic(self.run.num_fragments, self._refuse)
        syncer = Syncer(
            self._run_of_a_process(),
            self._claim(SYNCER),
            arithmetic,
            NoEvaluator(),
            self._time_text,
            self.nonce,
            on_commit=lambda state, commit: self._committed(state),
        )
        self.syncers.append(self.world.start(SYNCER, syncer.serve(), delay_s))

    def _committed(self, state: RunState) -> None:
        if state.n > self.state.n:
            self.state = state

    def _start_learner(self, name: str, delay_s: float) -> None:
        condition, actors = self.conditions[name], list[Actor]()
        condition.connect()
        self.incarnations[name] = actors

        def begin(steps: Steps[Any]) -> None:
            actors[:] = [actor for actor in actors if not actor.ended]
            actors.append(self.world.start(name, steps))

        learner = VirtualLearner(
            condition,
            self._run_of_a_process(),
            name,
            self._claim(name),
            VirtualTraining(condition),
            NamedPayloads(name),
            self.nonce,
            VirtualLanes(begin).start,
            Stalls(condition),
        )
        actors.append(self.world.start(name, learner.train(), delay_s))
        mtbf_s = self.hardware.get(name, Hardware()).mtbf_s
        if mtbf_s is not None:
            fails_s = self.world.now_s + delay_s + self._failures[name].exponential(mtbf_s)
            self.world.call_at(fails_s, lambda: self._fail(name, actors))

    def _fail(self, name: str, incarnation: list[Actor]) -> None:
        """A failure of the hardware, unless this process has ended before."""
        if self.incarnations.get(name) is incarnation:
            self._say(f"{name} fails")
            self._end(name, self.hardware[name].restart_s)

    def _living(self, name: str) -> list[Actor]:
        actors = self.syncers if name == SYNCER else self.incarnations.get(name, [])
        return [actor for actor in actors if not actor.ended]

    def _end(self, name: str, back_after_s: float) -> str | None:
        """End a unit's processes; the reason if that has no effect, because it is down already and will be back."""
        living = self._living(name)
        if not living:
            return "it is down"
        self._book_pause(name)
        for actor in living:
            self.world.kill(actor)
        if name != SYNCER:
            self.incarnations.pop(name)
            self._down_since_s[name] = self.world.now_s
        revive = self._start_syncer if name == SYNCER else lambda: self._revive(name)
        self.world.call_at(self.world.now_s + back_after_s, revive)
        return None

    def _revive(self, name: str) -> None:
        self.conditions[name].down_s += self.world.now_s - self._down_since_s.pop(name)
        self._start_learner(name, 0.0)

    # -- faults -------------------------------------------------------------------------------------------------

    def _inject(self, fault: Injection) -> None:
        self.injected += 1
        text, reasons = f"#{fault.number} {fault.kind} ", []
        for name in fault.targets:
            reason = self._befall(name, fault)
            if reason is not None:
                reasons.append(f"no effect on {name}: {reason}")
                self.without_effect.append(f"{text}{name} at {format_duration(self.world.now_s)}, since {reason}")
        self._say("; ".join([text + ", ".join(fault.targets), *reasons]))

    def _befall(self, name: str, fault: Injection) -> str | None:
        """Apply a fault to a unit; the reason if that has no effect."""
        if name == SUPERVISOR:
            return "units go on without it"
        effect: Callable[[str, Injection], str | None] = getattr(self, f"_{fault.kind.replace('-', '_')}")
        return effect(name, fault)

    # one effect for each fault of faults.py

    def _kill(self, name: str, fault: Injection) -> str | None:
        start_s, held_s = self.starts.of(name, len(fault.targets)), fault.revive_after_s
        if start_s is None:
            return self._end(name, RESTART_S if held_s is None else held_s)
        return self._end(name, (held_s or 0.0) + RestartPolicy().first_delay_s + start_s)

    def _second_syncer(self, name: str, fault: Injection) -> str | None:
        self._start_syncer()
        return None

    def _partition(self, name: str, fault: Injection) -> str | None:
        until_s = self.world.now_s + (fault.for_s or 0.0)
        self._cut_off_until_s[name] = max(self._cut_off_until_s.get(name, 0.0), until_s)
        return None

    def _full(self, name: str, fault: Injection) -> str | None:
        until_s = self.world.now_s + (fault.for_s or 0.0)
        self._full_until_s[name] = max(self._full_until_s.get(name, 0.0), until_s)
        return None

    def _errors(self, name: str, fault: Injection) -> str | None:
        self._fails[name] = self.world.now_s + (fault.for_s or 0.0), fault.share or 0.0
        return None

    def _corrupt(self, name: str, fault: Injection) -> str | None:
        self.conditions[name].corrupt += 1
        return None

    def _poison(self, name: str, fault: Injection) -> str | None:
        self.conditions[name].poison += 1
        return None

    def _pause(self, name: str, fault: Injection) -> str | None:
        frozen = [actor for actor in self._living(name) if not actor.paused]
        if not frozen:
            return "it is paused" if self._living(name) else "it is down"
        for actor in frozen:
            self.world.pause(actor)
        self._paused[name] = (self.world.now_s, frozen)

        def wake() -> None:
            for actor in frozen:
                self.world.resume(actor)
            if name in self._paused and self._paused[name][1] is frozen:
                self._book_pause(name)

        self.world.call_at(self.world.now_s + (fault.for_s or 0.0), wake)
        return None

    def _book_pause(self, name: str) -> None:
        """Book the end of a unit's pause: it wakes, dies, or the history is over."""
        since_s, _ = self._paused.pop(name, (self.world.now_s, []))
        if name != SYNCER:
            self.conditions[name].stalled_s += self.world.now_s - since_s

    def _slow(self, name: str, fault: Injection) -> str | None:
        condition, factor = self.conditions[name], fault.factor or 1.0
        link = condition.island.link
        if link.up_bps is None and link.down_bps is None:
            return "the rate of its link is unknown"

        condition.become(factor, self.world.now_s)
        usual_s = self.world.now_s + (fault.for_s or 0.0)
        self.world.call_at(usual_s, lambda: condition.become(1 / factor, usual_s))
        return None

    def _refuse(self, offer: Offer) -> str | None:
        return "bad_norms" if offer.id in self.conditions[offer.learner].poisoned else None

    # -- the world's questions ----------------------------------------------------------------------------------

    def _latency_s(self, actor: Actor, operation: Operation) -> float:
        return self._repeated_s(actor.name, operation) + self._call_s(actor, operation)

    def _repeated_s(self, name: str, operation: Operation) -> float:
        """How long a call is repeated that a full or failing store refuses."""
        now_s, attempts = self.world.now_s, 0
        waits_s = max(0.0, self._full_until_s.get(name, 0.0) - now_s) if isinstance(operation, Create) else 0.0
        until_s, share = self._fails.get(name, (0.0, 0.0))
        while now_s + waits_s < until_s and self._tries.uniform() < share:
            attempts += 1
            waits_s += pause_s(attempts, StoreUnavailableError(""), self._tries.uniform())
        return waits_s

    def _call_s(self, actor: Actor, operation: Operation) -> float:
        condition = self.conditions.get(actor.name)
        if condition is None:
            return self.side.call_s(operation, self.world.now_s, self.state.n >= 0)
        return self._round_trip_s(condition) + condition.transfer_s(operation, self.world.now_s)

    def _round_trip_s(self, condition: Condition) -> float:
        rtt_s = condition.island.link.rtt_s
        return self.latency_s if rtt_s is None else rtt_s

    def _held_until_s(self, actor: Actor, operation: Operation) -> float:
        until_s, condition = self._cut_off_until_s.get(actor.name, 0.0), self.conditions.get(actor.name)
        if condition is None or until_s > self.world.now_s:
            return until_s
        return condition.held_until_s(operation, self._round_trip_s(condition), self.world.now_s)

    def _ended(self, actor: Actor) -> None:
        """A fenced process is an expected end; any other error is an error of the code and is raised."""
        if actor.error is not None and not isinstance(actor.error, FencedError):
            if isinstance(actor.error, DilocoError):
                raise actor.error
            raise RuntimeError(f"{actor.name or 'a fault'} ended at {self.world.now_s:.3f} s") from actor.error

    def _say(self, text: str) -> None:
        self.log.append(f"{self.world.now_s:.3f} s  {text}")


def units_of(run: RunFormat) -> tuple[Unit, ...]:
    """The units that faults can hit."""
    return (*(Unit(island.name, island.region) for island in run.islands), Unit(SYNCER, None))


def refuse_impossible_faults(faults: Sequence[Injection]) -> None:
    """Called before the simulation. Raises UsageError for a fault that cannot hit this unit."""
    for fault in faults:
        what = f"#{fault.number} at {format_duration(fault.at_s)}: "
        hits = FAULTS[fault.kind].hits
        others = {SYNCER, SUPERVISOR}.intersection(fault.targets)
        if hits == "learners" and others:
            raise UsageError(
                f"{what}a simulated run cannot do {fault.kind} to the {min(others)}",
                hint="target a learner, learners (one of them), regions (one of them) or region:NAME",
            )
        if hits == "syncer" and fault.targets != (SYNCER,):
            raise UsageError(f"{what}{fault.kind} starts a {SYNCER}, and nothing else", hint=f"target: {SYNCER}")
