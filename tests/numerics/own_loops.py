"""Loops of a user's own in this process: `join` by the URL of a memory store, which the product's syncer serves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import torch

from diloco_cli import join
from diloco_cli.clock import sleep_s
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.loop import island
from diloco_cli.loop.island import LoopIsland
from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.records import RunFormat, encode
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.tasks.build import build_model
from diloco_cli.training.inner import build_optimizer
from tests.numerics.harness import Threads, make_run, serve
from tests.numerics.tiny import ROWS, TinyStream

SYNC = SyncSettings(every=4, fragments=2, overlap=1, quorum=1)
OUTER = OuterSettings(lr=0.7, momentum=0.5)
INNER = InnerSettings(lr=0.01, schedule="constant", warmup_steps=0)  # a rate by progress depends on when news arrive


def own_run(infra: str = "loop/addressed", learners: int = 1, rounds: int = 6, **changes: Any) -> RunFormat:
    run = make_run(learners, rounds, changes.pop("sync", SYNC), OUTER, changes.pop("inner", INNER))
    return replace(run, islands=tuple(replace(island, infra=infra) for island in run.islands), **changes)


@dataclass
class Meeting:
    """A run in a memory store of its own, served from the start."""

    run: RunFormat
    url: str = field(default_factory=lambda: f"memory://own-{uuid4().hex}")
    threads: Threads = field(default_factory=Threads)

    def __post_init__(self) -> None:
        self.store.create(FORMAT_KEY, encode(self.run))
        self.threads.start(serve, self.run, self.store)
        while self.store.get(commit_key(0)) is None:
            assert not self.threads.failures
            sleep_s(0.005)

    @property
    def store(self) -> Store:
        return open_store(self.url)

    def loop(self, name: str = "l0", **words: Any) -> OwnLoop:
        return OwnLoop(self, name, **words)


class OwnLoop:
    """A plain loop. `words` are those of `join`."""

    def __init__(
        self, meeting: Meeting, name: str, optimizer: Any = None, learner: type[Learner] = Learner, **words: Any
    ) -> None:
        self.run, self.data = meeting.run, TinyStream()
        self.model = build_model(meeting.run.settings)
        make = optimizer or (lambda model: build_optimizer(model, meeting.run.settings.train.inner))
        self.optimizer = make(self.model)
        with patch.object(island, "Learner", learner):
            self.island: LoopIsland = join(meeting.url, name=name, model=self.model, optimizer=self.optimizer, **words)
        self.drawn: list[int] = []
        self.losses: list[float] = []

    def train_once(self, tokens: int = ROWS) -> torch.Tensor:
        """Forward, backward and an optimizer step, without a word to the island."""
        at = self.island.position
        loss = self.model(*self.data.batch(self.island.shard, self.island.num_shards, at, tokens))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.drawn.append(at)
        self.losses.append(float(loss.detach()))
        return loss

    def step(self) -> bool:
        return self.island.step(loss=self.train_once(), tokens=ROWS)

    def to_end(self) -> None:
        while not self.island.over:
            self.step()
