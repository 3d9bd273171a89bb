"""Runs with real threads and real timing: learners of different speeds, a store that answers late, a learner that dies
and comes back. What such a run did depends on chance; what its tape says of it must not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco_cli.clock import sleep_s
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.wire import encode
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Created, Exists
from diloco_cli.tasks.build import Batch, Data, build_data
from tests.numerics.harness import Threads, make_run, process_of, serve

STEP_S = 0.002


class LateStore(MemoryStore):
    """Every answer takes up to `late_s`, drawn anew each time."""

    def __init__(self, late_s: float, seed: int) -> None:
        super().__init__()
        self._late_s, self._random = late_s, random.Random(seed)

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        sleep_s(self._random.random() * self._late_s)
        return super().get(key, max_bytes)

    def create(self, key: str, data: bytes) -> Created | Exists:
        sleep_s(self._random.random() * self._late_s)
        return super().create(key, data)


@dataclass
class SlowData:
    """The run's data; a batch takes its time."""

    data: Data
    step_s: float

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        sleep_s(self.step_s)
        return self.data.batch(shard, num_shards, position, batch_tokens)

    def held_out(self, num_sequences: int):  # type: ignore[no-untyped-def]
        return self.data.held_out(num_sequences)


@dataclass
class Chance:
    """What differs from run to run. `dies_after`: so many steps the first incarnation of the first learner
    makes, and some more until its moments are saved."""

    late_s: float = 0.0
    seed: int = 0
    dies_after: int | None = None


def live_format(
    sync: SyncSettings, rounds: int = 10, inner: InnerSettings | None = None, learners: int = 3
) -> RunFormat:
    """Three learners whose steps take 1, 1.5 and 2 times as long."""
    inner = inner or InnerSettings(lr=1e-2, warmup_steps=8, save_every=1)
    run = make_run(learners, rounds, sync, OuterSettings(), inner)
    return replace(run, settings=replace(run.settings, sync=replace(sync, skip_after_s=600.0)))


def run_live(run: RunFormat, chance: Chance) -> MemoryStore:
    """Train to the end; returns the bucket."""
    store, threads = LateStore(chance.late_s, chance.seed), Threads()
    store.create(FORMAT_KEY, encode(run))
    threads.start(serve, run, store)
    for index, island in enumerate(run.islands):
        dies_after = chance.dies_after if index == 0 else None
        threads.start(_live_learner, run, store, island.name, index, dies_after)
    threads.join()
    return store


def _live_learner(run: RunFormat, store: MemoryStore, name: str, index: int, dies_after: int | None) -> None:
    _live_incarnation(run, store, name, index, dies_after)
    if dies_after is not None:
        _live_incarnation(run, store, name, index, None)


def _live_incarnation(run: RunFormat, store: MemoryStore, name: str, index: int, dies_after: int | None) -> None:
    data = SlowData(build_data(run.settings), STEP_S * (1 + index / 2))
    process = process_of(
        run, store, name, leaves=lambda: dies_after is not None and dead(), may_drain=lambda: False, data=data
    )  # fmt: skip
    dead = _death(process.learner, dies_after or 0)
    process.train()


def _death(learner: Learner, after_steps: int) -> Callable[[], bool]:
    """Dead after so many steps, and after an offer that names saved moments for the successor."""
    last: list[int] = []

    def dead() -> bool:
        progress = learner.progress
        if learner.saves.newest is not None and progress.steps >= after_steps and not last:
            last.append(progress.next_seq)
        return bool(last) and progress.next_seq > last[0]

    return dead
