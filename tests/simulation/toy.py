"""A supervised fleet small enough to follow by hand, on the simulator's integer arithmetic and one-thread learners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RunSettings, SyncSettings, TrainSettings
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.actors.membership import enter
from diloco_cli.protocol.actors.syncer import DisplacedError, NoEvaluator, Syncer, serving
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import Island, Offer, ProcessClaim, RunFormat, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import OPERATOR
from diloco_cli.virtual.world import Actor
from tests.faulty_world import FaultyWorld
from tests.histories.integers import IntegerArithmetic
from tests.histories.learner import LearnerProfile, SimulatedLearner
from tests.histories.witness import Beliefs
from tests.simulation.bucket_check import commits_of

Refusal = Callable[[Offer], str | None]
StartThreads = Callable[[list[Steps[Any]]], None]
BATCH_TOKENS = 4
STEP_S = 0.05


def run_of(settings: RunSettings, islands: Iterable[Island], elements: int = 1) -> RunFormat:
    """Fragments of so many numbers each."""
    fragments = settings.sync.fragments
    layout = balanced_layout([ParameterFact(f"w{i}", (elements,), False) for i in range(fragments)], fragments)
    return RunFormat("id", settings.name, "2026-01-01T00:00:00.000Z", settings, tuple(islands), layout, "test")


def make_run(learners: int = 2, fragments: int = 2, merges: int = 10, **sync: object) -> RunFormat:
    """Equal islands, two steps a slot; the run ends after about `merges` merges by everybody."""
    every = 2 * fragments
    tokens = merges * every * BATCH_TOKENS * learners // fragments
    settings = RunSettings(
        name="toy",
        train=TrainSettings(tokens=tokens, batch_tokens=BATCH_TOKENS),
        sync=replace(SyncSettings(every=every, fragments=fragments, skip_after_s=2.0), **sync),  # type: ignore[arg-type]
    )
    return run_of(settings, (Island(f"l{i}", "here", BATCH_TOKENS, every, 80.0, STEP_S) for i in range(learners)))


@dataclass
class ToyProcess:
    """Of a learner."""

    name: str
    threads: list[Actor] = field(default_factory=list)
    ended: bool = False


class ToyFleet:
    """Starts the run's actors in a world and restarts those that crash, as a supervisor would."""

    def __init__(self, run: RunFormat, world: FaultyWorld | None = None) -> None:
        self.run, self.world = run, world or FaultyWorld()
        self.published = Beliefs()
        self.profile: dict[str, LearnerProfile] = {}
        self.restart = True
        self._numbers = count()
        self._refuse: Refusal = lambda offer: None
        self._unfit: Refusal = lambda offer: None
        self.format = run.keyring.sign(OPERATOR, FORMAT_KEY, encode(run))
        self.world.store.create(FORMAT_KEY, self.format)
        self.world.on_end = self._ended

    def nonce(self) -> str:
        return f"{next(self._numbers):032x}"

    def claim(self) -> ProcessClaim:
        return ProcessClaim(0, self.nonce(), "host", 1, "then", "test")

    def syncer(self, name: str = "syncer", delay_s: float = 0.0) -> Actor:
        claim = self.claim()
        run = self._syncers_run()
        arithmetic = IntegerArithmetic(run, self._refuse, self._unfit)
        self.served = syncer = Syncer(run, claim, arithmetic, NoEvaluator(), lambda: "then", self.nonce)
        return self.world.start(name, serving(syncer), delay_s)

    def _syncers_run(self) -> RunFormat:
        """The run as a syncer's process opens it."""
        return self.opened()

    def opened(self) -> RunFormat:
        """The run as a process has it that has read the format alone."""
        return replace(self.run, kept={FORMAT_KEY: self.format})

    def learner(self, name: str, delay_s: float = 0.0) -> Actor:
        return self._process(name, self.opened(), lambda learner: learner.train(), delay_s)

    def _process(
        self, name: str, run: RunFormat, steps_of: Callable[[SimulatedLearner], Steps[RunState]], delay_s: float = 0.0
    ) -> Actor:
        """A learner's process: its threads live and die together. Returns the first one."""
        process = ToyProcess(name)

        def start_threads(threads: list[Steps[Any]]) -> None:
            for steps in threads:
                self._start_thread(process, f"{name}/{len(process.threads)}", steps)

        return self._start_thread(process, name, steps_of(self._learner(run, name, start_threads)), delay_s)

    def _start_thread(self, process: ToyProcess, name: str, steps: Steps[Any], delay_s: float = 0.0) -> Actor:
        actor = self.world.start(name, steps, delay_s)
        actor.owner = process
        process.threads.append(actor)
        return actor

    def _learner(self, run: RunFormat, name: str, start_threads: StartThreads) -> SimulatedLearner:
        return SimulatedLearner(run, name, self.claim(), self.nonce, self.published, self._profile(name), start_threads)

    def kill_all(self) -> None:
        """At once, and nobody brings them back."""
        restart, self.restart = self.restart, False
        for actor in list(self.world.actors):
            self.world.kill(actor)
        self.restart = restart

    def pause(self, actor: Actor) -> None:
        """The whole process that this is a thread of."""
        for thread in actor.owner.threads:
            self.world.pause(thread)

    def resume(self, actor: Actor) -> None:
        for thread in actor.owner.threads:
            if thread.paused and not thread.ended:
                self.world.resume(thread)

    def newcomer(self, name: str, batch_tokens: int = BATCH_TOKENS, region: str = "elsewhere") -> Actor:
        """An island that the launch did not know: it asks, and takes part once it is admitted."""
        island = Island(name, region, batch_tokens, 1, 1e9, 1e-9)
        self._profile(name)

        def steps(learner: SimulatedLearner) -> Steps[RunState]:
            learner.run = yield from enter(replace(learner.run, members=()), island, self.nonce(), "then")
            return (yield from learner.train())

        return self._process(name, replace(self.run, members=(island,)), steps)

    def _profile(self, name: str) -> LearnerProfile:
        return self.profile.setdefault(name, LearnerProfile(STEP_S))

    def start(self) -> Self:
        self.syncer()
        self.start_learners()
        return self

    def start_learners(self) -> None:
        for island in self.run.islands:
            self.learner(island.name)

    def living(self, name: str) -> list[Actor]:
        return [actor for actor in self.world.actors if actor.name == name and not actor.ended]

    def kill(self, *names: str) -> None:
        """Who lives under these names."""
        for actor in [actor for name in names for actor in self.living(name)]:
            self.world.kill(actor)

    def ended_within(self, actor: Actor, seconds: float) -> bool:
        return self.world.run(lambda: actor.ended, seconds)

    def num_commits(self) -> int:
        return len(self.world.store.list("commit/", limit=100_000))

    def until_commits(self, number: int, within_s: float = 60.0) -> Self:
        assert self.world.run(lambda: self.num_commits() >= number, within_s), f"no {number} commits: {self.log_tail()}"
        return self

    def records(self) -> list[dict[str, Any]]:
        """The log as plain data."""
        return commits_of(self.world.store)

    def kinds(self) -> list[str]:
        return [record["kind"] for record in self.records()]

    def ended(self) -> bool:
        return all(actor.ended for actor in self.world.actors)

    def finish(self, within_s: float = 60.0) -> None:
        assert self.world.run(self.ended, within_s), f"not over after {within_s} s: {self.log_tail()}"

    def log_tail(self) -> list[str]:
        return [key for _, _, key in self.world.writes if key.startswith("commit/")][-3:]

    def _ended(self, actor: Actor) -> None:
        """A crash (no result) or a lost answer is restarted, and a syncer that a command has displaced; an error of the
        code's own is not hidden."""
        crashed = actor.result is None and (
            actor.error is None or type(actor.error).__name__ in ("StoreUnavailableError", DisplacedError.__name__)
        )
        process, name = actor.owner, actor.name
        if process is not None:
            if process.ended or not (crashed or actor.error):
                return
            process.ended, name = True, process.name
            for other in process.threads:
                self.world.kill(other)
        if not (crashed and self.restart):
            return
        if name == "syncer":
            self.syncer(delay_s=0.2)
        elif self.run.island(name) is not None:
            self.learner(name, delay_s=0.2)
        elif name in self.profile:
            self.newcomer(name)

    def errors(self) -> list[BaseException]:
        return [a.error for a in self.world.actors if a.error and type(a.error).__name__ != "StoreUnavailableError"]
