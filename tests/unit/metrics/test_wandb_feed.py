"""A run in Weights & Biases: one W&B run over several sessions, in steps of commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco_cli.metrics.wandb_feed import Feed, start_wandb
from diloco_cli.protocol.log.commit_log import fold
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import LOG
from diloco_cli.store.memory import MemoryStore
from tests.unit.protocol.records import RUN, applied, commit, output


class Log:
    """A log in a store, written commit by commit."""

    def __init__(self) -> None:
        self.store, self.state = MemoryStore(), RunState()
        self.add("epoch_start", outputs=tuple(output(f, 0, -1) for f in range(RUN.num_fragments)))

    def add(self, kind: str, **fields: Any) -> None:
        record = commit(self.state, kind, **fields)
        data = RUN.keyring.sign(LOG, commit_key(record.n), encode(record))
        self.store.create(commit_key(record.n), data)
        self.state = fold(RUN, self.state, data)

    def merge(self, seq: int) -> None:
        made = output(self.state.slot % RUN.num_fragments, self.state.n + 1, self.state.slot)
        offer = applied(seq=seq, base=seq, data_start=8 * seq, data_end=8 * seq + 8)
        self.add("merge", slot=self.state.slot, inputs=(offer,), outputs=(made,), alive=2)


class Steps:
    """A W&B run, as far as it is used."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged.append((step, data))


def feed(log: Log, first: int = 0) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """What one session sends, and whether the run is over."""
    tracker = Steps()
    over = Feed(tracker, RUN, log.store, first).send()
    return tracker.logged, over


def test_each_commit_with_figures_is_a_step_and_a_session_goes_on_where_wandb_stands() -> None:
    log = Log()
    log.merge(0)
    log.add("eval", evaluated=1, loss=3.5, tokens=4)
    first, over = feed(log)
    assert [step for step, _ in first] == [1, 2] and not over
    assert first[0][1] == {"tokens": 4, "participants": 1, "alive": 2, "grace_used_s": 0.0}
    assert first[1][1] == {"tokens": 4, "loss": 3.5}
    log.merge(1)
    log.add("finish")
    second, over = feed(log, 3)
    assert [step for step, _ in second] == [3] and over
    assert feed(log, 4) == ([], True)


def test_each_session_offline_is_a_folder_of_the_runs_id(tmp_path: Path) -> None:
    """By that id W&B makes one run of all that are synced; a second folder of one second has a number behind it."""
    pytest.importorskip("wandb")
    log = Log()
    for session in range(2):
        log.merge(session)
        started = start_wandb(RUN, "diloco", None, True, tmp_path)
        Feed(started, RUN, log.store, 0).send()
        started.finish()
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*/run-{RUN.run_id}.wandb"))) == 2
