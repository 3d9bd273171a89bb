"""A whole run in virtual time: the product's syncer and learners' books on a simulated bucket, under faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count

from diloco_cli.errors import DilocoError, FencedError, UsageError
from diloco_cli.faults.scenario import FaultKind
from diloco_cli.faults.timetable import SYNCER, Draws, Injection, Unit
from diloco_cli.protocol.keys import FORMAT_KEY
from diloco_cli.protocol.operations import Create, Operation
from diloco_cli.protocol.records import Offer, ProcessClaim, RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.syncer import Syncer
from diloco_cli.protocol.wire import encode
from diloco_cli.simulate.arithmetic import NoEvaluator, TraceArithmetic
from diloco_cli.simulate.island import Condition, Incarnation, Sizes
from diloco_cli.simulate.world import LATENCY_S, Actor, World

START = datetime(2000, 1, 1, tzinfo=UTC)  # of the virtual clock: runs in virtual time carry no real date
RESTART_S = 5.0  # of a process that its supervisor starts again
CAN: tuple[FaultKind, ...] = ("kill", "pause", "slow", "partition", "corrupt", "poison", "second-syncer")


@dataclass(frozen=True)
class Hardware:
    """What a run's format does not say of an island: failures of its own accord (None: none) and how long they last."""

    mtbf_s: float | None = None
    restart_s: float = RESTART_S


@dataclass
class SimulatedFleet:
    """Everybody of one run. The same arguments give the same history, to the byte."""

    run: RunFormat
    sizes: Sizes
    hardware: dict[str, Hardware]
    faults: tuple[Injection, ...] = ()
    seed: int = 0
    merge_s: float = 0.0
    latency_s: float = LATENCY_S
    world: World = field(default_factory=World)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        unable = sorted({fault.kind for fault in self.faults} - set(CAN))
        if unable:
            raise UsageError(
                f"a simulated run cannot do {', '.join(unable)}; it can do {', '.join(CAN)}",
                hint="diloco chaos breaks real processes",
            )
        self._numbers = count()
        self.conditions = {island.name: Condition(island) for island in self.run.islands}
        self.incarnations: dict[str, Incarnation] = {}
        self.syncers: list[Actor] = []
        self.state = RunState()
        self._down_since_s: dict[str, float] = {}
        self._failures = {name: Draws(self.seed, f"failures of {name}") for name in self.conditions}
        self.world.latency_s, self.world.unreachable_until_s = self._latency_s, self._unreachable_until_s
        self.world.on_end = self._ended
        self.world.store.create(FORMAT_KEY, encode(self.run))

    # -- a history ----------------------------------------------------------------------------------------------

    def run_for(self, seconds: float) -> None:
        """Until the run is over, or so much virtual time has passed. Raises what no fault explains."""
        self._start_syncer()
        for name in self.conditions:
            self._start_learner(name, 0.0)
        for fault in self.faults:
            if not fault.skipped:
                self.world.call_at(fault.at_s, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        self.world.run(self._over, seconds)
        for name, since_s in self._down_since_s.items():
            self.conditions[name].down_s += self.world.now_s - since_s

    def _over(self) -> bool:
        return self.state.phase == "FINISHED"

    def nonce(self) -> str:
        return f"{self.seed & 0xFFFFFFFF:08x}{next(self._numbers):024x}"

    def _claim(self, host: str) -> ProcessClaim:
        return ProcessClaim(0, self.nonce(), host, 1, self._time_text(), self.run.software)

    def _time_text(self) -> str:
        at = datetime.fromtimestamp(START.timestamp() + self.world.now_s, UTC)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    # -- processes ----------------------------------------------------------------------------------------------

    def _start_syncer(self, delay_s: float = 0.0) -> None:
        arithmetic = TraceArithmetic(self.run.num_fragments, self._refuse)
        syncer = Syncer(
            self.run, self._claim(SYNCER), arithmetic, NoEvaluator(), self._time_text, self.nonce,
            on_commit=lambda state, commit: self._committed(state),
        )  # fmt: skip
        self.syncers.append(self.world.start(SYNCER, syncer.serve(), delay_s))

    def _committed(self, state: RunState) -> None:
        if state.n > self.state.n:
            self.state = state

    def _start_learner(self, name: str, delay_s: float) -> None:
        condition, island = self.conditions[name], self.conditions[name].island
        incarnation = Incarnation(self.run, condition, self.sizes, self._claim(name), self.nonce, self.world)
        self.incarnations[name] = incarnation
        incarnation.start(delay_s)
        mtbf_s = self.hardware.get(island.name, Hardware()).mtbf_s
        if mtbf_s is not None:
            fails_s = self.world.now_s + delay_s + self._failures[name].exponential(mtbf_s)
            self.world.call_at(fails_s, lambda: self._fail(name, incarnation))

    def _fail(self, name: str, incarnation: Incarnation) -> None:
        """A failure of the hardware's own, unless something else has ended this process before."""
        if self.incarnations.get(name) is incarnation:
            self._say(f"{name} fails")
            self._kill(name, self.hardware[name].restart_s)

    def _kill(self, name: str, back_after_s: float) -> None:
        if name == SYNCER:
            for actor in self.syncers:
                self.world.kill(actor)
            self.world.call_at(self.world.now_s + back_after_s, self._start_syncer)
            return
        incarnation = self.incarnations.pop(name, None)
        if incarnation is None:
            return  # it is down already, and will be back
        for actor in incarnation.actors:
            self.world.kill(actor)
        self._down_since_s[name] = self.world.now_s
        self.world.call_at(self.world.now_s + back_after_s, lambda: self._revive(name))

    def _revive(self, name: str) -> None:
        self.conditions[name].down_s += self.world.now_s - self._down_since_s.pop(name)
        self._start_learner(name, 0.0)

    # -- faults -------------------------------------------------------------------------------------------------

    def _inject(self, fault: Injection) -> None:
        self._say(f"#{fault.number} {fault.kind} {', '.join(fault.targets)}")
        for name in fault.targets:
            if fault.kind == "kill":
                self._kill(name, RESTART_S if fault.revive_after_s is None else fault.revive_after_s)
            elif fault.kind == "pause":
                self._pause(name, fault.for_s or 0.0)
            elif fault.kind == "second-syncer":
                self._start_syncer()
            else:
                self._disturb(name, fault)

    def _pause(self, name: str, for_s: float) -> None:
        actors = self.syncers if name == SYNCER else self.incarnations[name].actors if name in self.incarnations else []
        frozen = [actor for actor in actors if not (actor.ended or actor.paused)]
        for actor in frozen:
            self.world.pause(actor)

        def wake() -> None:
            for actor in frozen:
                self.world.resume(actor)

        self.world.call_at(self.world.now_s + for_s, wake)
        if name != SYNCER:
            self.conditions[name].stalled_s += for_s

    def _disturb(self, name: str, fault: Injection) -> None:
        condition = self.conditions.get(name)
        if condition is None:
            raise UsageError(f"a simulated run cannot {fault.kind} the {name}: give a learner, a region or all")
        if fault.kind == "slow":
            condition.slow *= fault.factor or 1.0
            self.world.call_at(self.world.now_s + (fault.for_s or 0.0), lambda: _divide(condition, fault.factor or 1.0))
        elif fault.kind == "partition":
            until_s = self.world.now_s + (fault.for_s or 0.0)
            condition.unreachable_until_s = max(condition.unreachable_until_s, until_s)
        elif fault.kind == "corrupt":
            condition.corrupt += 1
        else:
            condition.poison += 1

    def _refuse(self, offer: Offer) -> str | None:
        return "norm_cap" if offer.id in self.conditions[offer.learner].poisoned else None

    # -- the world's questions ----------------------------------------------------------------------------------

    def _latency_s(self, actor: Actor, operation: Operation) -> float:
        merging = isinstance(operation, Create) and operation.key.startswith("state/") and self.state.n >= 0
        return self.latency_s + (self.merge_s if merging else 0.0)

    def _unreachable_until_s(self, actor: Actor) -> float:
        condition = self.conditions.get(actor.name)
        return 0.0 if condition is None else condition.unreachable_until_s

    def _ended(self, actor: Actor) -> None:
        """A fenced process leaves in peace; anything else that ends with an error is the code's own."""
        if actor.error is not None and not isinstance(actor.error, FencedError):
            if isinstance(actor.error, DilocoError):
                raise actor.error
            raise RuntimeError(f"{actor.name or 'a fault'} ended at {self.world.now_s:.3f} s") from actor.error

    def _say(self, text: str) -> None:
        self.log.append(f"{self.world.now_s:.3f} s  {text}")


def units_of(run: RunFormat) -> tuple[Unit, ...]:
    """What faults can hit."""
    return (*(Unit(island.name, island.region) for island in run.islands), Unit(SYNCER, None))


def _divide(condition: Condition, factor: float) -> None:
    condition.slow /= factor
