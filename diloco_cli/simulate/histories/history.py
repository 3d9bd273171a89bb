"""One history: a run by simulated processes, a phase of faults, then a phase without in which progress is demanded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diloco_cli.errors import DilocoError, FencedError, UsageError
from diloco_cli.protocol.keys import FORMAT_KEY, SYNCER
from diloco_cli.protocol.operations import Create, Delete, Get, Operation, Put, Steps
from diloco_cli.protocol.records import RunFormat
from diloco_cli.protocol.standby import Standby
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.syncer import Syncer
from diloco_cli.protocol.wire import encode
from diloco_cli.simulate.faulty_calls import Fault, Injected
from diloco_cli.simulate.histories.bucket import Bucket
from diloco_cli.simulate.histories.client import Client
from diloco_cli.simulate.histories.demands import check_reasons, check_restart, check_work
from diloco_cli.simulate.histories.disturbances import Disturber
from diloco_cli.simulate.histories.folds import no_garbage_collection, remembered_folds, snapshots_every
from diloco_cli.simulate.histories.integers import IntegerArithmetic
from diloco_cli.simulate.histories.learner import Beliefs, Habits, Learner
from diloco_cli.simulate.histories.monitor import OPERATOR, Monitor
from diloco_cli.simulate.histories.options import Options, run_of
from diloco_cli.simulate.histories.processes import Process, SlowEvaluator
from diloco_cli.simulate.histories.replayer import LIVENESS, Replayer, ViolationError, expect
from diloco_cli.simulate.histories.script import CallFaults, Script, drawn_disturbances
from diloco_cli.simulate.histories.stream import Stream
from diloco_cli.simulate.world import Actor, World
from diloco_cli.store.port import Created
from diloco_cli.store.retry import LONGEST_PAUSE_S

LONGEST_FAULTY = 3.0  # times an undisturbed run
TEND_EVERY_S = 1.0
LEAVE_S = 90.0
MOST_EVENTS = 400_000
STAYS_AWAY = (0, UsageError.exit_status, FencedError.exit_status)  # nobody restarts what has left with these


Moment = tuple[float, str, str]  # when (seconds), what, and the key of what was created, if it was


@dataclass(frozen=True)
class Actors:
    """What a history is made of. Tests hand in others to see mistakes caught."""

    syncer: type[Syncer] = Syncer
    standby: type[Standby] = Standby
    learner: type[Learner] = Learner
    client: type[Client] = Client
    arithmetic: type[IntegerArithmetic] = IntegerArithmetic


@dataclass
class Outcome:
    """How a history ended. `tail`: everything worth telling, in its order; `objects`: what then lies in the bucket."""

    commits: int = 0
    crashes: int = 0
    operations: int = 0
    faulty: Script = field(default_factory=Script)
    violation: ViolationError | None = None
    tail: list[Moment] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[bytes] = field(default_factory=list)
    per_actor: Counter[str] = field(default_factory=Counter)


class WatchedWorld(World):
    """A world whose every write is watched, and whose calls have faults."""

    history: History

    def _effect(self, actor: Actor, operation: Operation) -> Any:
        store = self.store
        if type(operation) is Get:
            return store.get(operation.key)
        before = store.get(operation.key) if isinstance(operation, Delete) else None
        answer = super()._effect(actor, operation)
        self.history.took_effect(actor, operation, answer, before)
        return answer


class History:
    """The same seed, options and script give the same history, event by event."""

    def __init__(
        self, seed: int, options: Options, script: Script | None = None, actors: Actors = Actors(), walls: int = 0
    ) -> None:
        """`walls`: another number gives everybody another wall clock, and changes nothing else."""
        self.seed, self.options, self.actors, self.walls = seed, options, actors, walls
        self.run: RunFormat = run_of(options)
        self.world = WatchedWorld(
            store=(bucket := Bucket(lambda: self.world.now_s)), timeout_s=1.0 + 10 * options.latency_s
        )
        self.world.history, self.bucket = self, bucket
        self.monitor = Monitor(bucket, self.run)
        self.beliefs = Beliefs({}, self.monitor.on_adoption, self.monitor.on_publication)
        given = None if script is None else {(f.actor, f.operation): f.fault for f in script.calls}
        self.calls = CallFaults(options, given)
        names = [island.name for island in self.run.islands]
        drawn = drawn_disturbances(options, seed, names) if script is None else script.disturbances
        self.disturbances = drawn
        self.draw = Stream(seed, "history")
        self.processes: list[Process] = []
        self.counts: Counter[str] = Counter()
        self.crashes = self.changes = 0
        self.tail: list[Moment] = []
        self.roles = names
        self.standing_by: set[str] = set()
        self.disturber = Disturber(self)
        bucket.objects[FORMAT_KEY] = encode(self.run)
        self._wire()

    def _wire(self) -> None:
        world, latency_s = self.world, self.options.latency_s
        world.on_end = self._ended
        world.fault_of = self._fault_of
        world.latency_s = lambda actor, operation: latency_s * _spread(actor)
        world.answer_s = lambda actor, operation: latency_s * _spread(actor)

    # -- from beginning to end ----------------------------------------------------------------------------------

    def live(self) -> Outcome:
        """Both phases and the last checks. A violation is part of the outcome, not an error."""
        outcome = Outcome()
        try:
            with no_garbage_collection(), remembered_folds(), snapshots_every(self.options.snapshot_every):
                self._live()
        except ViolationError as violation:
            outcome.violation = violation
        outcome.commits, outcome.crashes = self.monitor.replayer.n + 1, self.crashes
        outcome.operations = sum(actor.operations for actor in self.world.actors)
        outcome.per_actor = Counter({actor.name: actor.operations for actor in self.world.actors if actor.name})
        outcome.faulty = Script(tuple(self.calls.struck), self.disturbances)
        outcome.tail, outcome.log, outcome.objects = self.tail, self._log(), self.bucket.objects
        for actor in self.world.actors:
            actor.steps.close()
        return outcome

    def _live(self) -> None:
        for _ in range(self.options.syncers):
            self.start_syncer(self.draw.uniform() * 4 * self.options.latency_s)
        for _ in range(self.options.standbys):
            self.start_standby()
        for name in self.roles:
            self.start_learner(name, self.draw.uniform() * self.options.slot_s)
        for disturbance in self.disturbances:
            self.world.call_at(disturbance.at_s, lambda d=disturbance: self.disturber.strike(d))  # type: ignore[misc]
        longest_s = LONGEST_FAULTY * self.options.merges * self.options.slot_s
        self._go_on(self._faulty_phase_over, longest_s if self.options.faulty_share <= 1.0 else LEAVE_S)
        self._heal()
        self._go_on(self._over, LEAVE_S + 60 * self.options.merges * max(1.0, self.options.slot_s))
        expect(self._over(), LIVENESS, f"the run does not end: {self.standing()}")
        self._go_on(lambda: all(process.ended for process in self.processes), LEAVE_S)
        living = [process.name for process in self.processes if not process.ended]
        expect(not living, LIVENESS, f"{living} do not leave, {LEAVE_S:g} s after the run has ended")
        self._check_at_the_end()

    def _go_on(self, until: Callable[[], bool], within_s: float) -> None:
        """`until` is asked whenever something has changed: a commit, the end of a process."""
        world, next_one, advance = self.world, self.world.next_due, self.world.advance
        deadline_s, events, seen = world.now_s + within_s, 0, -1
        while True:
            if seen != self.changes:
                seen = self.changes
                if until():
                    return
            actor = next_one()
            if actor is None or world.now_s > deadline_s:
                return
            advance(actor)
            events += 1
            if events > MOST_EVENTS:
                raise ViolationError(LIVENESS, f"{events} events, and no end: somebody spins; {self.standing()}")

    def _faulty_phase_over(self) -> bool:
        if self.options.faulty_share > 1.0:
            return bool(self.processes) and all(process.ended for process in self.processes)
        return self.monitor.replayer.slot >= self.options.faulty_share * self.options.merges or self._over()

    def _over(self) -> bool:
        kinds = self.monitor.replayer.kinds
        return bool(kinds) and kinds[-1] == "finish"

    def standing(self) -> str:
        """Who is there, and the reason that a syncer gives for what it does."""
        living = [process.name for process in self.processes if not process.ended]
        return f"commit {self.monitor.replayer.n}, {self.world.now_s:.1f} s, alive: {', '.join(living) or 'nobody'}"

    # -- processes ----------------------------------------------------------------------------------------------

    def new_process(self, role: str) -> Process:
        self.counts[role] += 1
        process = Process(role, self.counts[role], self.world, self.seed, self.actors.client, self.walls)
        process.started_merges = self.monitor.replayer.merges
        self.processes.append(process)
        return process

    def living(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role and not process.ended]

    def start_syncer(self, delay_s: float = 0.0) -> None:
        process = self.new_process(SYNCER)
        process.start(self._syncer(process).serve(), delay_s=delay_s)

    def _syncer(self, process: Process, because: str = "") -> Syncer:
        arithmetic = self.actors.arithmetic(self.run, unfit=self.disturber.unfit)
        process.serves = served = self.actors.syncer(
            self.run, process.claim(), arithmetic, SlowEvaluator(), process.time_text, process.nonce,
            on_commit=self.monitor.on_commit, because=because,
        )  # fmt: skip
        return served

    def start_standby(self) -> None:
        """A syncer's process that waits for its turn; once it has served, it is like any other."""
        process = self.new_process(SYNCER)

        def steps() -> Steps[Any]:
            standby = self.actors.standby(self.run, process.claim(), f"s{process.number}", self.draw.uniform())
            if (reason := (yield from standby.wait())) is None:
                return "the run is over"
            self.standing_by.discard(process.name)
            return (yield from self._syncer(process, reason).serve())

        self.standing_by.add(process.name)
        process.start(steps())

    def start_learner(self, name: str, delay_s: float = 0.0, run: RunFormat | None = None) -> None:
        process = self.new_process(name)
        process.start(self.learner_steps(process, run or self.run), delay_s=delay_s)

    def learner_steps(self, process: Process, run: RunFormat) -> Steps[RunState]:
        learner = self.actors.learner(
            run, process.role, process.claim(), process.nonce, self.beliefs, self._habits(process.role),
            process.start_threads,
        )  # fmt: skip
        return learner.train()

    def _habits(self, name: str) -> Habits:
        slow = self.options.slowest if name == "l0" else 1.0
        return Habits(
            self.options.step_s * slow,
            lambda: self.disturber.leaves(name),
            lambda: self.disturber.poison(name),
            lambda: self.disturber.corrupts(name),
            self.options.saves_every_rounds,
        )

    def _ended(self, actor: Actor) -> None:
        if actor.owner is None:  # a timer
            if actor.error is not None:
                raise actor.error
            return None
        process: Process = actor.owner.process
        if process.ended:
            return None
        error, main = actor.error, actor is process.threads[0]
        if error is None and actor.result is None and not main:
            process.end(None)  # a crash struck this thread: the whole process is gone
        elif error is None and not main:
            return None
        elif error is None:
            process.end(0 if actor.result is not None else None)
        else:
            process.end(_status_of(actor, error))
        if process.status is None:
            return self.crashed(process)
        self.note(f"{process.name} left with status {process.status}")
        return self._replace(process)

    def crashed(self, process: Process) -> None:
        self.crashes += 1
        self.note(f"{process.name} crashed")
        self._replace(process)

    def _replace(self, process: Process) -> None:
        """As supervisors do: what crashed or failed comes back, what was fenced or has finished does not."""
        self.changes += 1
        process.ended_merges = self.monitor.replayer.merges
        if process.status in STAYS_AWAY:
            return
        delay_s = self.draw.between(0.05, 2.0)
        self.world.call_at(self.world.now_s + delay_s, lambda: self.revive(process.role))

    def revive(self, role: str) -> None:
        """A syncer's place is its own: that somebody stands by does not keep its supervisor from starting it."""
        serving = [process for process in self.living(role) if process.name not in self.standing_by]
        if serving or role == OPERATOR or self.disturber.stopped:
            return
        if role == SYNCER:
            self.start_syncer()
        else:
            self.disturber.start(role)

    # -- the phase without faults -------------------------------------------------------------------------------

    def _heal(self) -> None:
        self.note("faults cease")
        self.monitor.grown_healthy(self.world.now_s)
        self.healed_s, self.healed_n = self.world.now_s, self.monitor.replayer.n
        self.healed_operations = {process.name: process.operations for process in self.processes}
        self.disturber.heal()
        for process in self.processes:
            process.resume()
        self._tend()

    def _tend(self) -> None:
        """Everybody is there, or comes back; and the log grows."""
        if self._over():
            return
        for role in (SYNCER, *self.roles):
            self.revive(role)
        self.disturber.let_in()
        self.monitor.check_gap(self.world.now_s, self.longest_gap_s)
        check_reasons(self)
        self.world.call_at(self.world.now_s + TEND_EVERY_S, self._tend)

    @property
    def longest_gap_s(self) -> float:
        """Longest pause of a client that was refused + what the syncer may wait for + ten slots of the slowest."""
        options = self.options
        return 2 * LONGEST_PAUSE_S + 2 * options.skip_after_s + 20 * options.slot_s * options.slowest

    # -- the world's questions ----------------------------------------------------------------------------------

    def _fault_of(self, actor: Actor, operation: Operation) -> Injected | None:
        if actor.owner is None or self.monitor.healthy:
            return None
        process: Process = actor.owner.process
        away = self.disturber.away(process.role, operation)
        if away is not None:
            return away
        fault = self.calls.strike(actor.name, actor.operations, operation, actor.owner.stream.bits())
        if fault is not None:
            self.note(f"{actor.name} {_named(operation)}: {fault.kind.value}")
            if fault.kind is Fault.PAUSE:
                self.freeze(process, fault.seconds)
        return fault

    def freeze(self, process: Process, for_s: float) -> None:
        process.pause()
        self.world.call_at(self.world.now_s + for_s, process.resume)

    def took_effect(self, actor: Actor, operation: Operation, answer: Any, before: bytes | None) -> None:
        role = actor.owner.process.role if actor.owner is not None else SYNCER
        match operation:
            case Create(key, data) if isinstance(answer, Created):
                self.tail.append((self.world.now_s, f"{actor.name} created", key))
                if self.options.list_lag_s:
                    lag_s = self.options.list_lag_s * self.draw.uniform()
                    self.bucket.listed_from_s[key] = self.world.now_s + lag_s
                self.monitor.created(role, key, data, self.world.now_s)
                self.changes += 1
                if key.startswith("offer/"):
                    self.monitor.worked.add(actor.owner.process.name)
            case Put(key, _):
                self.monitor.put(role, key)
            case Delete(key):
                self.note(f"{actor.name} deleted {key}")
                self.monitor.deleted(role, key, before)

    def note(self, text: str) -> None:
        self.tail.append((self.world.now_s, text, ""))

    # -- the last checks ----------------------------------------------------------------------------------------

    def _log(self) -> list[bytes]:
        keys = (f"commit/{n:012d}.json" for n in range(self.monitor.replayer.n + 1))
        return [self.bucket.objects.get(key, b"") for key in keys]

    def _check_at_the_end(self) -> None:
        """A reader that was not there, with nothing but the bucket."""
        replayer = Replayer(self.bucket, self.run).read().check_published(self.beliefs.offers)
        check_restart(self, replayer)
        check_work(self)


def _spread(actor: Actor) -> float:
    """Times the usual latency: mostly near 1, now and then ten times as long."""
    if actor.owner is None:
        return 1.0
    bits: int = actor.owner.stream.bits()
    return (0.5, 0.75, 1.0, 1.25, 1.5)[bits % 5] if bits & 0x3F0000 else 10.0


def _named(operation: Operation) -> str:
    return f"{type(operation).__name__.lower()} {getattr(operation, 'key', '')}"


def _status_of(actor: Actor, error: BaseException) -> int:
    """5: whoever leaves with an error does so with a documented status."""
    if isinstance(error, ViolationError):
        raise error
    if not isinstance(error, DilocoError):
        raise ViolationError("exit", f"{actor.name} ended with {type(error).__name__}: {error}") from error
    return error.exit_status
