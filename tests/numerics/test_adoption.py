"""An adoption touches the parameters of its fragment and nothing else: moments, learning rate and data go on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from diloco_cli.clock import utc_now_text
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.protocol.actors.learner import FetchedVersion, Mail
from diloco_cli.protocol.actors.syncer import NoEvaluator, Syncer
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import FragmentVersion, encode
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.tensors.flat import flatten
from tests.numerics.harness import CLOCK, TrainingProcess, claim, make_run, process_of
from tests.numerics.tiny import ROWS

ADAMW = InnerSettings(lr=0.02, warmup_steps=10, schedule="cosine", weight_decay=0.1)
MIXINGS = pytest.mark.parametrize("mixing", ["replace", "rebase"])
FRAGMENT = 1


def after_some_steps(mixing: str, steps: int = 5) -> TrainingProcess:
    """A learner in the middle of its first round, without threads; the syncer has made version 0 and is gone."""
    sync = SyncSettings(every=30, fragments=3, mixing=mixing)  # type: ignore[arg-type]
    run = make_run(2, 4, sync, OuterSettings(), ADAMW)
    store = MemoryStore()
    store.create(FORMAT_KEY, encode(run))
    syncer = Syncer(run, claim(), TorchArithmetic(run), NoEvaluator(), utc_now_text, nonce)
    perform(syncer._take_over(), store, CLOCK)
    process = process_of(run, store, "l0")
    process.perform(process.learner._begin())
    for _ in range(steps):
        process.perform(process.learner.step())
    return process


def arrival(process: TrainingProcess) -> FetchedVersion:
    """A committed version that differs from everything that the learner has."""
    fragment = process.learner.run.layout.fragments[FRAGMENT]
    values = torch.linspace(-1, 1, fragment.num_parameters)
    return FragmentVersion(FRAGMENT, 7, 4, 1, "state", "weights"), values, 0.0


def adopt(process: TrainingProcess, weights: FetchedVersion) -> None:
    """It hears of the version, and takes it over."""
    learner = process.learner
    learner.follower.take = lambda: Mail(learner.state, {FRAGMENT: weights})  # type: ignore[method-assign]
    process.perform(learner.hear())
    process.perform(learner.adopt())
    assert learner.progress.books[FRAGMENT].base is weights[0]


def moments(process: TrainingProcess) -> dict[str, Any]:
    return copy.deepcopy(process.training.replica.optimizer.state_dict()["state"])


@MIXINGS
def test_inner_moments_are_kept(mixing: str) -> None:
    process = after_some_steps(mixing)
    before = moments(process)
    adopt(process, arrival(process))
    after = moments(process)
    assert before and before.keys() == after.keys()
    for index, kept in before.items():
        assert float(kept["step"]) == float(after[index]["step"]) == 5
        assert all(torch.equal(kept[name], after[index][name]) for name in ("exp_avg", "exp_avg_sq"))


@MIXINGS
def test_the_learning_rate_goes_on_where_it_was(mixing: str) -> None:
    """Of two learners that do the same, one adopts: its next steps have the same learning rates, and they go on."""
    process, other = after_some_steps(mixing), after_some_steps(mixing)
    reached = learning_rate(process)
    adopt(process, arrival(process))
    rates = []
    for learner in (process, other):
        rates.append([])
        for _ in range(4):
            learner.perform(learner.learner.step())
            rates[-1].append(learning_rate(learner))
    assert rates[0] == rates[1] and reached < rates[0][0] < rates[0][1], "warm-up goes on, it does not begin anew"


def learning_rate(process: TrainingProcess) -> float:
    """Of the last step."""
    (rate,) = {float(group["lr"]) for group in process.training.replica.optimizer.param_groups}
    return rate


@MIXINGS
def test_the_next_batch_is_the_next_batch(mixing: str) -> None:
    process = after_some_steps(mixing)
    drawn: list[tuple[int, int, int]] = []
    data = process.training.replica.data
    batch = data.batch

    def noted(shard: int, num_shards: int, position: int, batch_tokens: int) -> Any:
        drawn.append((shard, num_shards, position))
        return batch(shard, num_shards, position, batch_tokens)

    data.batch = noted  # type: ignore[method-assign]
    process.perform(process.learner.step())
    adopt(process, arrival(process))
    process.perform(process.learner.step())
    assert drawn == [(0, 2, 5 * ROWS), (0, 2, 6 * ROWS)]


@pytest.mark.parametrize(
    ("mixing", "offered", "share", "steps"),
    [
        ("replace", True, 0.0, 0),
        ("rebase", True, None, 5),
        ("rebase", False, 0.0, 0),  # no merge holds what it has trained, or will: others went the same way
    ],
)
def test_only_its_fragment_changes_and_the_books_say_what_counts(
    mixing: str, offered: bool, share: float | None, steps: int
) -> None:
    process = after_some_steps(mixing)
    if offered:
        assert process.learner.progress._drafts([FRAGMENT], 0.0)
    learner, tensors = process.learner, process.training.replica.tensors
    fragments = learner.run.layout.fragments
    own = [flatten(fragment, tensors) for fragment in fragments]
    adopted_before = learner.fragments.bases[FRAGMENT].clone()
    new = arrival(process)
    adopt(process, new)
    for index in (0, 2):
        assert torch.equal(flatten(fragments[index], tensors), own[index])
        assert (learner.progress.books[index].steps, learner.progress.books[index].data_start) == (5, 0)
    kept = own[FRAGMENT] - adopted_before if share is None else share * (own[FRAGMENT] - new[1])
    torch.testing.assert_close(flatten(fragments[FRAGMENT], tensors), new[1] + kept)
    book = learner.progress.books[FRAGMENT]
    assert (book.steps, book.data_start, book.base.version) == (steps, (5 - steps) * ROWS, 7)
    assert learner.progress.position == 5 * ROWS
