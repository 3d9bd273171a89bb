"""Whole runs that really train, in virtual time: the product's learners, syncer and arithmetic; how long steps and
transfers take is the test's affair. The same arguments give the same bucket, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from diloco_cli.protocol.actors.learner import Learner, Progression, Stepped
from diloco_cli.protocol.actors.syncer import Evaluator, NoEvaluator, Syncer
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.operations import Create, Get, Operation, Sleep, Steps
from diloco_cli.protocol.log.records import ProcessClaim, RunFormat, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.memory import MemoryStore
from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.replica import DeviceTraining, Replica
from diloco_cli.training.wire import TensorWire
from diloco_cli.virtual.world import LATENCY_S, Actor, VirtualLanes, World

ENDS_WITHIN_S = 10_000.0
Seconds = Callable[[str, int], float]
"""Of a learner's how many-th step, upload or download."""


def _usual(name: str, number: int) -> float:
    return LATENCY_S


class TimedTraining(DeviceTraining):
    """The product's, whose steps take as long as they are told to."""

    def __init__(self, run: RunFormat, name: str, step_s: Seconds) -> None:
        data, shard = build_data(run.settings), run.shard_of(name)
        super().__init__(run, Replica(run.settings, build_model(run.settings), data, shard, run.num_shards))
        self._name, self._step_s, self._steps = name, step_s, count()

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        yield Sleep(self._step_s(self._name, next(self._steps)))
        return self.train(position, batch_tokens, at)


class VirtualFleet:
    """One run, from its beginning."""

    def __init__(
        self, run: RunFormat, step_s: Seconds, upload_s: Seconds = _usual, download_s: Seconds = _usual,
        wire: Callable[[RunFormat, str], TensorWire] = lambda run, name: TensorWire(run),
        evaluator: Callable[[RunFormat, MemoryStore], Evaluator] = lambda run, store: NoEvaluator(),
        absent: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """`absent`: islands whose learners nobody starts."""
        self.run, self.world, self.state = run, World(), RunState()
        self._wire, self._evaluator = wire, evaluator
        self._step_s, self._upload_s, self._download_s = step_s, upload_s, download_s
        self._numbers, self._uploads, self._downloads = count(), count(), count()
        self.learners: dict[str, Learner] = {}
        self.world.latency_s, self.world.on_end = self._latency_s, self._ended
        self.world.store.create(FORMAT_KEY, encode(run))
        self.syncer = self.start_syncer()
        self.world.run(lambda: self.store.get(commit_key(0)) is not None, 10.0)
        for island in run.islands:
            if island.name not in absent:
                self._start(island.name)

    def start_syncer(self) -> Actor:
        arithmetic, evaluator = TorchArithmetic(self.run), self._evaluator(self.run, self.store)
        syncer = Syncer(
            self.run, self._claim(), arithmetic, evaluator, lambda: "then", self._nonce, on_commit=self.committed
        )  # fmt: skip
        return self.world.start("syncer", syncer.serve())

    def committed(self, state: RunState, commit: Commit) -> None:
        self.state = state

    def _start(self, name: str) -> None:
        lanes = VirtualLanes(lambda steps: self.world.start(name, steps))
        self.learners[name] = Learner(
            self.run, name, self._claim(), TimedTraining(self.run, name, self._step_s), self._wire(self.run, name),
            self._nonce, lanes.start,
        )  # fmt: skip
        self.world.start(name, self.learners[name].train())

    @property
    def store(self) -> MemoryStore:
        assert isinstance(self.world.store, MemoryStore)
        return self.world.store

    def finish(self) -> MemoryStore:
        """The bucket after the run's end."""
        assert self.world.run(lambda: self.state.phase == "FINISHED", ENDS_WITHIN_S), self.state.metrics.recent_merges
        self.world.run_for(5.0)
        return self.store

    def _nonce(self) -> str:
        return f"{next(self._numbers):032x}"

    def _claim(self) -> ProcessClaim:
        return ProcessClaim(0, self._nonce(), "test", 1, "then", "test")

    def _latency_s(self, actor: Actor, operation: Operation) -> float:
        match operation:
            case Create(key, data) if key.startswith("delta/") and data:
                return self._upload_s(actor.name, next(self._uploads))
            case Get(key, _) if key.startswith("weights/") and actor.name != "syncer":
                return self._download_s(actor.name, next(self._downloads))
        return LATENCY_S

    def _ended(self, actor: Actor) -> None:
        if actor.error is not None:
            raise actor.error


def run_virtual(
    run: RunFormat, step_s: Seconds, upload_s: Seconds = _usual, download_s: Seconds = _usual
) -> MemoryStore:
    """The bucket of a run that has finished."""
    return VirtualFleet(run, step_s, upload_s, download_s).finish()
