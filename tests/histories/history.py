"""One history: a run by simulated processes, a phase with faults, then one without, in which progress is demanded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from traceback import extract_tb
from typing import Any

from diloco_cli.protocol.log.keys import FORMAT_KEY, SYNCER
from diloco_cli.protocol.log.operations import Create, Delete, Get, Mend, Operation, Put, There
from diloco_cli.protocol.log.records import RunFormat, encode
from diloco_cli.signing import OPERATOR
from diloco_cli.store.port import Created
from diloco_cli.virtual.world import Actor
from tests.faulty_world import Fault, FaultyWorld, Injected
from tests.histories.client import Bucket
from tests.histories.forger import Forger, asked_again
from tests.histories.ledger import check_outcomes, max_lost
from tests.histories.liveness import Healthy, check_bucket, check_restart
from tests.histories.memo import remembered, tuned
from tests.histories.monitor import Monitor
from tests.histories.nemesis import Nemesis
from tests.histories.options import REGION, SLOW_LINK, Options, run_of
from tests.histories.processes import Process
from tests.histories.region import Region
from tests.histories.replayer import LIVENESS, Replayer, ViolationError, expect, plain
from tests.histories.script import Actors, CallFaults, HistoryResult, Moment, Script, drawn_nemesis_events
from tests.histories.stream import Stream
from tests.histories.supervisor import SimulatedSupervisor
from tests.histories.witness import Beliefs

MAX_FAULTY = 3.0  # times an undisturbed run
TEND_EVERY_S = 1.0
LEAVE_S = 90.0
LAST_LOOK_S, LAST_CALLS = 0.1, 40  # from the last look for offers to the run's end: calls for each learner
MAX_EVENTS, EVENTS_A_MERGE = 400_000, 200  # of a phase; of each learner
HELD_SHARE, HELD_S = 0.2, 30.0
FRAMES_TOLD = 4
LATE_CREATES, LATE_WITHIN_S = 0.3, 4.0  # of the offers that are deleted; after that
SPREAD = (0.5, 0.75, 1.0, 1.25, 1.5) * 63 + (10.0,) * 5  # times the usual latency


class WatchedWorld(FaultyWorld):
    """A world in which every write is checked."""

    history: History

    def _effect(self, actor: Actor, operation: Operation) -> Any:
        bucket, watcher = self.history.place_of(actor, operation)
        if type(operation) is There:
            operation = operation.operation
        if type(operation) is Get:
            return bucket.get(operation.key, operation.max_bytes)
        before = bucket.get(operation.key) if type(operation) is Delete else None
        answer = self._perform_at(bucket, actor, operation)
        self.history.took_effect(actor, operation, answer, before, watcher)
        return answer


class History:
    """The same seed, options and script give the same history, event by event."""

    def __init__(
        self,
        seed: int,
        options: Options,
        script: Script | None = None,
        actors: Actors = Actors(),
        walls: int = 0,
        remembers: bool = True,
    ) -> None:
        """`walls`: another number gives every process another wall clock, and changes nothing else. `remembers`: keep
        results of the product's pure functions (see `remembered`), which changes nothing either."""
        self.seed, self.options, self.actors, self.walls, self.remembers = seed, options, actors, walls, remembers
        self.run: RunFormat = run_of(options)
        self.world = WatchedWorld(
            store=(bucket := Bucket(lambda: self.world.now_s)),
            timeout_s=1.0 + 10 * options.latency_s,
            checks_uploads=options.checks_uploads,
        )
        self.world.history, self.bucket = self, bucket
        self.monitor = Monitor(bucket, self.run, last_look_s=self._last_look_s)
        self.beliefs = Beliefs({}, self.monitor.harm.offers, [], self.monitor.on_adoption, self.monitor.on_publication)
        self.beliefs.moments = self.monitor.moments
        given = None if script is None else {(f.actor, f.operation): f.fault for f in script.calls}
        self.calls = CallFaults(options, given)
        names = [island.name for island in self.run.islands]
        drawn = drawn_nemesis_events(options, seed, names) if script is None else script.nemesis_events
        self.nemesis_events = drawn
        self.draw = Stream(seed, "history")
        self.changes = self.lost_tokens = 0
        self.tail: list[Moment] = []
        self.roles = names
        self.nemesis, self.supervisor = Nemesis(self), SimulatedSupervisor(self)
        self.region = Region(self) if self.run.regions else None
        self.healthy: Healthy | None = None
        self.held_until_s: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        self.run.keep(FORMAT_KEY, self.run.keyring.sign(OPERATOR, FORMAT_KEY, encode(self.run)))
        self.bucket.put(FORMAT_KEY, self.run.kept[FORMAT_KEY])
        self.world.on_end, self.world.fault_of = self.supervisor.ended, self.fault_of
        usual = self.world.latency_s = _latency(self.options.latency_s)
        self.world.answer_s = lambda actor, call: 0.0 if type(call) is Get else usual(actor, call)
        if any(event.kind == SLOW_LINK for event in self.nemesis_events):
            self.world.latency_s = lambda actor, call: usual(actor, call) + self._transfer_s(actor, call)
        if self.region is not None:
            self.monitor.lives_apart(self.region.residents, self.region.bucket)

    def _transfer_s(self, actor: Actor, operation: Operation) -> float:
        return 0.0 if actor.owner is None else self.nemesis.transfer_s(actor.owner.process, operation)

    def _last_look_s(self) -> float:
        """The longest time of the syncer's last look at the mailboxes of all learners, also of those that joined."""
        return LAST_LOOK_S + LAST_CALLS * len(self.roles) * self.options.latency_s

    # -- from beginning to end ----------------------------------------------------------------------------------

    def live(self) -> HistoryResult:
        """Both phases and the last checks. A violation is part of the outcome, not an error."""
        outcome = HistoryResult()
        try:
            memory = remembered() if self.remembers else nullcontext()
            with tuned(**self.options.constants), memory:
                self._live()
        except ViolationError as violation:
            outcome.violation = violation
        except Exception as error:  # an error of a check or of the world: the campaign reports it with its seed
            outcome.violation = self._broken_off(error)
        outcome.commits, outcome.crashes = self.monitor.replayer.n + 1, self.supervisor.crashes
        outcome.operations = sum(actor.operations for actor in self.world.actors)
        outcome.per_actor = Counter({actor.name: actor.operations for actor in self.world.actors if actor.name})
        outcome.faulty = Script(tuple(self.calls.struck), self.nemesis_events)
        outcome.lost_tokens = self.lost_tokens
        outcome.processed_tokens = sum(account.tokens for account in self.beliefs.accounts)
        outcome.tail, outcome.log, outcome.objects = self.tail, self._log(), dict(self.bucket.objects)
        if self.region is not None:
            outcome.objects |= {f"{REGION}/{key}": data for key, data in self.region.bucket.objects.items()}
        for actor in self.world.actors:
            actor.steps.close()
        return outcome

    def _broken_off(self, error: Exception) -> ViolationError:
        for frame in extract_tb(error.__traceback__)[-FRAMES_TOLD:]:
            self.note(f"in {Path(frame.filename).name}, line {frame.lineno}, {frame.name}: {frame.line}")
        return ViolationError("exit", f"the history itself ended with {type(error).__name__}: {error}")

    def _live(self) -> None:
        for _ in range(self.options.syncers):
            self.supervisor.start_syncer(self.draw.uniform() * 4 * self.options.latency_s)
        for _ in range(self.options.standbys):
            self.supervisor.start_standby()
        for name in self.roles:
            self.supervisor.start_learner(name, self.draw.uniform() * self.options.slot_s)
        if self.options.forger:
            Forger(self)
        for event in self.nemesis_events:
            self.world.call_at(event.at_s, lambda d=event: self.nemesis.strike(d))  # type: ignore[misc]
        max_s = MAX_FAULTY * self.options.merges * self.options.slot_s
        self._go_on(self._faulty_phase_over, max_s if self.options.faulty_share <= 1.0 else LEAVE_S)
        self._heal()
        self._go_on(self._over, LEAVE_S + 60 * self.options.merges * max(1.0, self.options.slot_s))
        expect(self._over(), LIVENESS, f"the run does not end: {self.standing()}")
        self._go_on(lambda: self.supervisor.all_ended, LEAVE_S)
        living = [process.name for process in self.supervisor.processes if not process.ended]
        expect(not living, LIVENESS, f"{living} do not leave, {LEAVE_S:g} s after the run has ended")
        self.nemesis.losses.owner_restores(over=True)
        self._check_at_the_end()

    def _go_on(self, until: Callable[[], bool], within_s: float) -> None:
        """`until` is called after every change: a commit, the end of a process."""
        world, next_one, advance = self.world, self.world.next_due, self.world.advance
        deadline_s, events, seen = world.now_s + within_s, 0, -1
        most = MAX_EVENTS + EVENTS_A_MERGE * self.options.merges * self.options.learners
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
            if events > most:
                raise ViolationError(LIVENESS, f"{events} events, and no end: a process spins; {self.standing()}")

    def _faulty_phase_over(self) -> bool:
        if self.options.faulty_share > 1.0:
            return self.supervisor.all_ended
        return self.monitor.replayer.slot >= self.options.faulty_share * self.options.merges or self._over()

    def _over(self) -> bool:
        kinds = self.monitor.replayer.kinds
        return bool(kinds) and kinds[-1] == "finish"

    def standing(self) -> str:
        """The processes alive, and the reason that a syncer states, for messages."""
        living = [process.name for process in self.supervisor.processes if not process.ended]
        return f"commit {self.monitor.replayer.n}, {self.world.now_s:.1f} s, alive: {', '.join(living) or 'nobody'}"

    # -- the phase without faults -------------------------------------------------------------------------------

    def _heal(self) -> None:
        self.note("faults cease")
        self.monitor.grown_healthy(self.world.now_s)
        self.nemesis.heal()
        for process in self.supervisor.processes:
            process.resume()
        self.healthy = Healthy(self)
        if self.options.forger:
            asked_again(self)
        self._tend(self.healthy)

    def _tend(self, healthy: Healthy) -> None:
        """Bring back processes that are missing, and check that the log grows."""
        if self._over():
            return
        for role in (SYNCER, *self.roles):
            self.supervisor.revive(role)
        self.nemesis.readmit()
        self.nemesis.resume_if_stopped()
        healthy.check()
        self.world.call_at(self.world.now_s + TEND_EVERY_S, lambda: self._tend(healthy))

    # -- the world's questions ----------------------------------------------------------------------------------

    def fault_of(self, actor: Actor, operation: Operation) -> Injected | None:
        if actor.owner is None or self.monitor.healthy:
            return None
        process: Process = actor.owner.process
        away = self.nemesis.away(process.role, operation) or self.nemesis.away(process.name, operation)
        if away is None and self.region is not None and self.region.holds(actor, operation):
            away = self.nemesis.away(REGION, operation)
        if away is not None:
            return away
        if self._is_held_up(operation):
            return Injected(Fault.FULL)
        fault = self.calls.strike(actor.name, actor.operations, operation, actor.owner.stream.uniform())
        if fault is not None:
            self.note(f"{actor.name} {_named(operation)}: {fault.kind.value}")
            if fault.kind is Fault.TORN_WRITE and (key := getattr(operation, "key", "")).startswith("delta/"):
                self.monitor.suspects.add(key.split("/")[1])
            if fault.kind is Fault.PAUSE:
                self.supervisor.freeze(process, fault.seconds)
        return fault

    def _is_held_up(self, operation: Operation) -> bool:
        """Whether a commit that brings outcomes finds no room now. Some find none until a floor has taken their number,
        or for HELD_S: nothing that a commit brings may be lost with its number."""
        if Fault.FULL not in self.options.calls or not isinstance(operation, Create):
            return False
        key, data = operation.key, operation.data
        if not key.startswith("commit/") or not plain(data)["outcomes"]:
            return False
        if key not in self.held_until_s:
            held = Stream(self.seed, f"held {key}").chance(HELD_SHARE)
            self.held_until_s[key] = self.world.now_s + HELD_S if held else 0.0
        return self.held_until_s[key] > self.world.now_s and key not in self.bucket.objects

    def place_of(self, actor: Actor, operation: Operation) -> tuple[Bucket, Monitor | Region]:
        """The bucket that an operation goes to, and the object that checks its writes."""
        if self.region is not None and self.region.holds(actor, operation):
            return self.region.bucket, self.region
        return self.bucket, self.monitor

    def took_effect(
        self, actor: Actor, operation: Operation, answer: Any, before: bytes | None, watcher: Monitor | Region
    ) -> None:
        role = actor.owner.process.role if actor.owner is not None else SYNCER
        match operation:
            case Create(key, data) if isinstance(answer, Created):
                shown = key if watcher is self.monitor else f"{REGION}/{key}"
                self.tail.append((self.world.now_s, f"{actor.name} created", shown))
                if self.options.list_lag_s:
                    watcher.bucket.listed_from_s[key] = self._listed_at_s()
                watcher.created(role, key, data, self.world.now_s)
                self.changes += 1
                self._heard(actor.owner.process, key, data, watcher)
            case Put(key, _):
                watcher.put(role, key)
            case Mend(key, data, _):
                self.note(f"{actor.name} put back {key}")
                self.monitor.mended(key, data)
            case Delete(key):
                self.note(f"{actor.name} deleted {key}")
                if self.options.list_lag_s and before is not None:
                    watcher.bucket.listed_until_s[key] = self._listed_at_s()
                still_listed = watcher.bucket.listed_until_s.get(key, 0.0) > self.world.now_s
                self.monitor.deletions += before is not None or still_listed
                watcher.deleted(role, key, before, self.world.now_s)
                if before is not None and key.startswith("offer/"):
                    self._create_late(key, before, watcher)

    def _create_late(self, key: str, data: bytes, watcher: Monitor | Region) -> None:
        """Now and then a request of its learner that the network held up comes to its effect behind the floor."""
        draw = Stream(self.seed, f"late {key} {self.world.now_s}")
        if self.monitor.healthy or draw.uniform() >= LATE_CREATES:
            return

        def create() -> None:
            if isinstance(watcher.bucket.create(key, data), Created):
                self.note(f"a held-up request created {key} once more")
                watcher.created(key.split("/")[1], key, data, self.world.now_s)

        self.world.call_at(self.world.now_s + draw.between(0.0, LATE_WITHIN_S), create)

    def _heard(self, process: Process, key: str, data: bytes, watcher: Monitor | Region) -> None:
        """Note a process's write: later checks of it depend on this."""
        if process.role in self.roles and key.startswith(("offer/", "incarnation/")):
            process.said(key, data, self.monitor.replayer.merges)
        elif watcher is self.monitor and key.startswith("commit/"):
            commit = plain(data)
            if self.healthy is not None:
                self.healthy.committed(commit)
            if commit["kind"] == "stop" and commit["diverged"]:
                self.nemesis.paused()

    def _listed_at_s(self) -> float:
        """When listings show a change that is made now."""
        return self.world.now_s + self.options.list_lag_s * self.draw.uniform()

    def note(self, text: str) -> None:
        self.tail.append((self.world.now_s, text, ""))

    # -- the last checks ----------------------------------------------------------------------------------------

    def _log(self) -> list[bytes]:
        keys = (f"commit/{n:012d}.json" for n in range(self.monitor.replayer.n + 1))
        return [self.bucket.objects.get(key, b"") for key in keys]

    def _check_at_the_end(self) -> None:
        """Check the bucket with a fresh reader that knows nothing else."""
        apart = {} if self.region is None else self.region.published(self.beliefs.offers)
        at_home = {offer_id: data for offer_id, data in self.beliefs.offers.items() if offer_id not in apart}
        replayer = Replayer(self.bucket, self.run, self.monitor.replayer).read().check_published(at_home)
        if self.region is not None:
            self.region.check_at_the_end(apart)
        most = max_lost(self.run, max(replayer.batches.values()))
        self.lost_tokens = check_outcomes(self.beliefs.accounts, replayer, self.run.num_fragments, most)
        check_restart(self, replayer)
        if self.healthy is not None:
            self.healthy.check_operations()
            self.healthy.attendances.check_at_the_end()
            check_bucket(self)


def _latency(usual_s: float) -> Callable[[Actor, Operation], float]:
    """Each thread draws its own latencies: mostly near the usual one, now and then ten times as long. A read takes
    effect as it is answered, which is one event: what others do in between, they may as well do before the reader's
    next call."""
    drawn = [usual_s * times for times in SPREAD]
    length = len(drawn)

    def latency_s(actor: Actor, operation: Operation) -> float:
        owner = actor.owner
        if owner is None:
            return usual_s
        index = owner.stream.index
        return drawn[index(length)] + drawn[index(length)] if type(operation) is Get else drawn[index(length)]

    return latency_s


def _named(operation: Operation) -> str:
    return f"{type(operation).__name__.lower()} {getattr(operation, 'key', '')}"
