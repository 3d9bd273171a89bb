"""A loop of a user's own learns what the product's own loop learns, bit for bit."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key, offer_key
from diloco_cli.protocol.log.records import Offer, RunFormat, decode, encode
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from diloco_cli.training.inner import clip_gradients, set_learning_rate, step_learning_rate
from examples.quality.methods.streaming import StreamingLearner
from tests.numerics.harness import Threads, learn, outer_parameters, serve
from tests.numerics.own_loops import Meeting, OwnLoop, own_run
from tests.numerics.tiny import ROWS


def losses_of(store: Store) -> list[float | None]:
    """Of every offer, in order."""
    found: list[float | None] = []
    while (data := store.get(offer_key("l0", 1, len(found)))) is not None:
        found.append(decode(Offer, data, "offer").loss)
    return found


def last_merged(store: Store) -> int:
    """The number of the newest offer that a merge applied."""
    found, n = -1, 0
    while (data := store.get(commit_key(n))) is not None:
        found, n = max([found, *(item.seq for item in decode(Commit, data, "log").inputs)]), n + 1
    return found


def our_own_loop(run: RunFormat) -> Store:
    store, threads = MemoryStore(), Threads()
    store.create(FORMAT_KEY, encode(run))
    threads.start(serve, run, store)
    threads.start(learn, run, store, "l0", StreamingLearner)
    threads.join()
    return store


def as_our_loop_does(loop: OwnLoop) -> None:
    """One step with the run's settings: clipping and learning rate, by the run's progress."""
    run, island = loop.run, loop.island
    loss = loop.model(*loop.data.batch(island.shard, island.num_shards, island.position, ROWS))
    loop.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    clip_gradients(loop.model, run.settings.train.inner.clip_norm)
    set_learning_rate(loop.optimizer, step_learning_rate(run, island.progress, 0, False))
    loop.optimizer.step()
    island.step(tokens=ROWS, loss=loss)


@pytest.mark.usefixtures("one_thread")
def test_an_own_loop_alone_learns_what_our_loop_learns_bit_for_bit() -> None:
    run = own_run()
    ours = our_own_loop(run)
    meeting = Meeting(run)
    loop = meeting.loop(learner=StreamingLearner)  # merges are adopted after the same steps in each run
    while not loop.island.over:
        as_our_loop_does(loop)
    meeting.threads.join()
    learned, expected = losses_of(meeting.store), losses_of(ours)
    offers = min(len(learned), len(expected))  # each offers on until it has read that the run is over
    assert offers > max(8, last_merged(ours), last_merged(meeting.store)) and learned[:offers] == expected[:offers]
    first, second = outer_parameters(run, ours), outer_parameters(run, meeting.store)
    assert all(torch.equal(first[name], second[name]) for name in first)
