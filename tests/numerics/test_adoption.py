"""An adoption touches the parameters of its fragment and nothing else: moments, learning rate and data go on."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco_cli.algorithm.flat import gather
from diloco_cli.clock import utc_now_text
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.learner.exchange import Arrival
from diloco_cli.learner.loop import Trainer
from diloco_cli.protocol.driver import perform
from diloco_cli.protocol.keys import FORMAT_KEY
from diloco_cli.protocol.records import Output
from diloco_cli.protocol.syncer import Syncer
from diloco_cli.protocol.wire import encode
from diloco_cli.randomness import nonce
from diloco_cli.simulate.histories.integers import FailingEvaluator
from diloco_cli.store.memory import MemoryStore
from diloco_cli.syncer.arithmetic import TorchArithmetic
from tests.numerics.harness import CLOCK, claim, make_run, trainer_of
from tests.numerics.tiny import ROWS

ADAMW = InnerSettings(lr=0.02, warmup_steps=10, schedule="cosine", weight_decay=0.1)
MIXINGS = pytest.mark.parametrize("mixing", ["replace", "blend", "rebase", "adaptive"])
FRAGMENT = 1


def after_some_steps(mixing: str, steps: int = 5) -> Trainer:
    """A learner in the middle of its first round, without threads; the syncer has made version 0 and is gone."""
    sync = SyncSettings(every=30, fragments=3, mixing=mixing)  # type: ignore[arg-type]
    run = make_run(2, 4, sync, OuterSettings(), ADAMW)
    store = MemoryStore()
    store.create(FORMAT_KEY, encode(run))
    syncer = Syncer(run, claim(), TorchArithmetic(run), FailingEvaluator(), utc_now_text, nonce)
    perform(syncer._take_over(), store, CLOCK)
    trainer = trainer_of(run, store, "l0")
    for _ in range(steps):
        trainer.step()
    return trainer


def arrival(trainer: Trainer) -> Arrival:
    """A committed version that differs from everything that the learner has."""
    fragment = trainer.run.layout.fragments[FRAGMENT]
    values = torch.linspace(-1, 1, fragment.num_parameters)
    return Arrival(Output(FRAGMENT, 7, 4, 1, "state", "cast", rebase=True), values, 0.0)


def moments(trainer: Trainer) -> dict[str, Any]:
    return copy.deepcopy(trainer.replica.optimizer.state_dict()["state"])


@MIXINGS
def test_inner_moments_are_kept(mixing: str) -> None:
    trainer = after_some_steps(mixing)
    before = moments(trainer)
    trainer.adopt(arrival(trainer))
    after = moments(trainer)
    assert before and before.keys() == after.keys()
    for index, kept in before.items():
        assert float(kept["step"]) == float(after[index]["step"]) == 5
        assert all(torch.equal(kept[name], after[index][name]) for name in ("exp_avg", "exp_avg_sq"))


@MIXINGS
def test_the_learning_rate_goes_on_where_it_was(mixing: str) -> None:
    """Of two learners that do the same, one adopts: its next steps have the same learning rates, and they go on."""
    trainer, other = after_some_steps(mixing), after_some_steps(mixing)
    reached = trainer.learning_rate()
    trainer.adopt(arrival(trainer))
    rates = []
    for learner in (trainer, other):
        rates.append([])
        for _ in range(4):
            rates[-1].append(learner.learning_rate())
            learner.step()
    assert rates[0] == rates[1] and reached == rates[0][0] < rates[0][1], "warm-up goes on, it does not begin anew"


@MIXINGS
def test_the_next_batch_is_the_next_batch(mixing: str) -> None:
    trainer = after_some_steps(mixing)
    drawn: list[tuple[int, int, int]] = []
    data = trainer.replica.data
    batch = data.batch

    def noted(shard: int, num_shards: int, position: int, batch_tokens: int) -> Any:
        drawn.append((shard, num_shards, position))
        return batch(shard, num_shards, position, batch_tokens)

    data.batch = noted  # type: ignore[method-assign]
    trainer.step()
    trainer.adopt(arrival(trainer))
    trainer.step()
    assert drawn == [(0, 2, 5 * ROWS), (0, 2, 6 * ROWS)]


@pytest.mark.parametrize(
    ("mixing", "share", "steps"), [("replace", 0.0, 0), ("blend", 0.25, 0), ("rebase", None, 5), ("adaptive", None, 5)]
)
def test_only_its_fragment_changes_and_the_books_say_what_counts(mixing: str, share: float | None, steps: int) -> None:
    trainer = after_some_steps(mixing)
    sync = replace(trainer.run.settings.sync, blend=0.25)
    trainer.run = replace(trainer.run, settings=replace(trainer.run.settings, sync=sync))
    fragments = trainer.run.layout.fragments
    own = [gather(fragment, trainer.tensors) for fragment in fragments]
    adopted_before = trainer.exchange.sent_values(FRAGMENT, None).clone()
    new = arrival(trainer)
    trainer.adopt(new)
    for index in (0, 2):
        assert torch.equal(gather(fragments[index], trainer.tensors), own[index])
        assert (trainer.progress.books[index].steps, trainer.progress.books[index].data_start) == (5, 0)
    kept = own[FRAGMENT] - adopted_before if share is None else share * (own[FRAGMENT] - new.values)
    torch.testing.assert_close(gather(fragments[FRAGMENT], trainer.tensors), new.values + kept)
    book = trainer.progress.books[FRAGMENT]
    assert (book.steps, book.data_start, book.base.version) == (steps, (5 - steps) * ROWS, 7)
    assert trainer.progress.position == 5 * ROWS
