"""A fleet in virtual time whose learners step as they are told to: the product's learners and syncer on a bucket in
memory. It trains nothing (who merges what when), or the run's own model; the schedule is the same.

The same arguments give the same bucket, to the byte.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.errors import RunFailedError
from diloco_cli.forecast.stand_ins import NamedPayloads, TraceArithmetic
from diloco_cli.protocol.actors.learner import Learner, Moments, Progression, Stepped, Training, Values, Wire
from diloco_cli.protocol.actors.merging import Arithmetic
from diloco_cli.protocol.actors.syncer import NoEvaluator, Syncer
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.operations import Create, Get, Now, Operation, Sleep, Steps
from diloco_cli.protocol.log.records import MAX_EXACT, ProcessClaim, RunFormat, decode, encode
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.virtual.world import Actor, VirtualLanes, World

from .pacing import TOLERANCE_S, Pacing, StepClock
from .streaming import StreamingLearner

SETTLES_SLOTS = 4  # after the last step: offers on their way are merged
STANDS_STILL_ROUNDS = 100  # without a step; then the fleet is taken to be stuck
FOR_EVER_S = 1e12
THEN = "2000-01-01T00:00:00.000Z"  # on the virtual clock: no real date


class TrainsNothing:
    """Implements Training: only counts."""

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        yield from ()
        return Stepped(batch_tokens)

    def read(self, fragment: int) -> Values:
        return None

    def write(self, fragment: int, values: Values) -> None: ...

    def save(self) -> Moments | None:
        return None

    def restore(self, moments: bytes) -> bool:
        return True

    def reset(self) -> bool:
        return False


@dataclass(frozen=True)
class Ports:
    """What the fleet computes with: of each island by its name, and of the syncer. Default: nothing."""

    training: Callable[[str], Training] = lambda name: TrainsNothing()
    wire: Callable[[str], Wire] = NamedPayloads
    arithmetic: Arithmetic | None = None
    merged: Callable[[PacedFleet], None] = lambda fleet: None  # called after each merge


@dataclass
class PacedFleet:
    """Its learners step as their pacings say, in batches that are whole multiples of `quantum_tokens`, until together
    they have processed `budget` tokens. `tokens`, `steps`: of each learner; `stepped_s`: when the last step ended;
    `stepping`: the stretches in which each made one step after the other, from and to."""

    run: RunFormat
    pacings: dict[str, Pacing]
    quantum_tokens: int = 1
    budget: float = inf
    ports: Ports = field(default_factory=Ports)
    world: World = field(default_factory=World)
    state: RunState = field(default_factory=RunState)
    stepped_s: float = 0.0
    tokens: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    stepping: defaultdict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self._numbers = count()
        self._free_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.world.latency_s, self.world.on_end = self._latency_s, self._ended
        self.world.store.create(FORMAT_KEY, encode(self.run))
        arithmetic = self.ports.arithmetic or TraceArithmetic(self.run.num_fragments)
        syncer = Syncer(
            replace(self.run, kept={}),
            self._claim(),
            arithmetic,
            NoEvaluator(),
            lambda: THEN,
            self._nonce,
            on_commit=self._committed,
        )
        self.world.start("syncer", syncer.serve())
        for name in self.pacings:
            lanes = VirtualLanes(lambda steps, name=name: self.world.start(name, steps))  # type: ignore[misc]
            learner = (StreamingLearner if self.pacings[name].waits else Learner)(
                replace(self.run, kept={}),  # each process has read its own
                name,
                self._claim(),
                PacedTraining(self, name, self.ports.training(name)),
                self.ports.wire(name),
                self._nonce,
                lanes.start,
            )
            self.world.start(name, learner.train())

    @property
    def processed(self) -> int:
        return self.tokens.total()

    @property
    def is_spent(self) -> bool:
        return self.processed >= self.budget or self.state.phase == RunPhase.FINISHED

    @property
    def merges(self) -> list[Commit]:
        return [commit for commit in self.log if commit.kind == "merge"]

    @property
    def log(self) -> list[Commit]:
        found: list[Commit] = []
        while (data := self.world.store.get(key := commit_key(len(found)))) is not None:
            found.append(decode(Commit, data, key))
        return found

    def note_step(self, name: str, end_s: float) -> None:
        self.steps[name] += 1
        self.stepped_s = end_s
        stretches, start_s = self.stepping[name], end_s - self.pacings[name].step_s
        if stretches and start_s <= stretches[-1][1] + TOLERANCE_S:
            start_s = stretches.pop()[0]
        stretches.append((start_s, end_s))

    def _committed(self, state: RunState, commit: Commit) -> None:
        self.state = state
        if commit.kind == "merge":
            self.ports.merged(self)

    def _nonce(self) -> str:
        return f"{next(self._numbers):032x}"

    def _claim(self) -> ProcessClaim:
        return ProcessClaim(0, self._nonce(), "virtual", 1, THEN, self.run.software)

    def _latency_s(self, actor: Actor, operation: Operation) -> float:
        """Payloads take the time that the pacing says, one after the other; everything else takes none."""
        match operation:
            case Create(key, data) if key.startswith("delta/") and data:
                return self._transfer_s(actor.name, "up", self.pacings[actor.name].upload_s)
            case Get(key, _) if key.startswith("weights/") and actor.name in self.pacings:
                return self._transfer_s(actor.name, "down", self.pacings[actor.name].download_s)
        return 0.0

    def _transfer_s(self, name: str, direction: str, seconds: float) -> float:
        done_s = max(self._free_s[name, direction], self.world.now_s) + seconds
        self._free_s[name, direction] = done_s
        return done_s - self.world.now_s

    def _ended(self, actor: Actor) -> None:
        if actor.error is not None:
            raise actor.error


class PacedTraining:
    """Implements Training: steps of `inner` at the times that the fleet's pacing says, and none once its budget is
    spent."""

    def __init__(self, fleet: PacedFleet, name: str, inner: Training) -> None:
        self._fleet, self._name, self._inner = fleet, name, inner
        self._clock = StepClock(fleet.pacings[name], fleet.quantum_tokens)

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        now_s = yield Now()
        timed = None if self._fleet.is_spent else self._clock.next_step(now_s, batch_tokens)
        if timed is None:
            yield Sleep(FOR_EVER_S)
            raise AssertionError("no fleet runs so long")
        self._fleet.tokens[self._name] += timed.batch_tokens
        yield Sleep(timed.end_s - now_s)
        self._fleet.note_step(self._name, timed.end_s)
        return (yield from self._inner.step(position, timed.batch_tokens, at))

    def __getattr__(self, name: str) -> Any:  # reading, writing, saving: as the inner one does
        return getattr(self._inner, name)


def play_fleet(
    run: RunFormat, pacings: tuple[Pacing, ...], tokens: int, quantum_tokens: int = 1, ports: Ports | None = None
) -> PacedFleet:
    """Until the learners together have processed `tokens`. A fleet that trains nothing goes on whatever the run's
    target is; one that trains ends its learning rate's schedule at it."""
    if ports is None:
        run = replace(run, settings=replace(run.settings, train=replace(run.settings.train, tokens=MAX_EXACT - 1)))
    islands = tuple(replace(i, step_s=pacing.step_s) for i, pacing in zip(run.islands, pacings, strict=True))
    by_name = {island.name: pacing for island, pacing in zip(islands, pacings, strict=True)}
    fleet = PacedFleet(replace(run, islands=islands), by_name, quantum_tokens, tokens, ports or Ports())
    slot_s = max(i.local_steps * i.step_s for i in islands) / run.num_fragments
    round_s = max(run.settings.sync.every * p.step_s + p.upload_s + p.download_s for p in pacings)
    still_s = STANDS_STILL_ROUNDS * round_s + run.settings.sync.skip_after_s
    fleet.world.run(lambda: fleet.is_spent or fleet.world.now_s > fleet.stepped_s + still_s, inf)
    fleet.world.run_for(SETTLES_SLOTS * slot_s + max(p.step_s + p.upload_s + p.download_s for p in pacings))
    if not fleet.is_spent or not fleet.state.merges:
        raise RunFailedError(
            f"the fleet stopped after {fleet.processed:,} of {tokens:,} tokens and {fleet.state.merges} merges: "
            "nobody can go on",
            hint="lower sync.quorum, or give the learners more time",
        )
    return fleet
