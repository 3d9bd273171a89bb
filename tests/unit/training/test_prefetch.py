"""Batches that are built ahead are the same batches, with the same errors, at the same places."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.settings import DataSettings, InnerSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.tasks.build import Batch, build_data, build_model
from diloco_cli.training.replica import CPU, LEAST_S, WORTH_BESIDE_ACCELERATOR, WORTH_ON_CPU, Prefetched, Replica, pays

BATCH = 8
STEP_S = 1.0
WITHIN_S = 20.0


@dataclass
class Source:
    """Batches that tell what was asked for. One takes `build_s` on the test's clock; `fails` may raise for a position.
    Two at once are an error of their own."""

    build_s: float = STEP_S
    fails: Callable[[int], None] = lambda position: None
    now_s: float = 0.0
    asked: list[int] = field(default_factory=list)
    by: list[str] = field(default_factory=list)
    built: dict[int, threading.Event] = field(default_factory=dict)
    busy: threading.Lock = field(default_factory=threading.Lock)

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        assert self.busy.acquire(blocking=False), "two batches are built at once"
        try:
            self.asked.append(position)
            self.by.append(threading.current_thread().name)
            self.now_s += self.build_s
            self.fails(position)
            return torch.tensor([shard, num_shards, position, batch_tokens]), torch.tensor(position)
        finally:
            self.busy.release()
            self.built.setdefault(position, threading.Event()).set()

    def held_out(self, num_sequences: int) -> Iterator[Batch]:
        yield torch.tensor(num_sequences), torch.tensor(0)


def taken(source: Source, data: Prefetched, position: int, shard: int = 0, batch: int = BATCH) -> list[int]:
    """A batch as a training thread takes it: then comes a step."""
    found = data.batch(shard, 2, position, batch)[0].tolist()
    source.now_s += STEP_S
    return found


def ahead_of(source: Source, device: str = "cpu") -> Prefetched:
    return Prefetched(source, torch.device(device), lambda: source.now_s)


def running(source: Source, steps: int = 2) -> Prefetched:
    """After some steps, the batch at `steps` x BATCH being built ahead, and built."""
    data = ahead_of(source)
    for step in range(steps):
        taken(source, data, step * BATCH)
    wait_for(source, steps * BATCH)
    return data


def wait_for(source: Source, position: int) -> None:
    assert source.built.setdefault(position, threading.Event()).wait(WITHIN_S), "it was not built ahead"


def test_the_next_batch_is_there_before_it_is_asked_for() -> None:
    """The first one is not known to take long before there was a step to compare with."""
    source = Source()
    data = running(source)
    assert source.asked == [0, BATCH, 2 * BATCH]
    assert source.by == ["MainThread", "MainThread", "prefetch"]
    assert taken(source, data, 2 * BATCH) == [0, 2, 2 * BATCH, BATCH]
    wait_for(source, 3 * BATCH)
    assert source.asked == [0, BATCH, 2 * BATCH, 3 * BATCH], "each once, and no more than one ahead"


@pytest.mark.parametrize(("device", "worth"), [("cpu", WORTH_ON_CPU), ("cuda", WORTH_BESIDE_ACCELERATOR)])
@pytest.mark.parametrize("ahead", [False, True])
def test_only_what_takes_a_good_part_of_a_step_is_built_ahead(device: str, worth: float, ahead: bool) -> None:
    source = Source(build_s=(1.1 if ahead else 0.9) * worth * STEP_S)
    data = ahead_of(source, device)
    taken(source, data, 0)
    taken(source, data, BATCH)
    if ahead:
        wait_for(source, 2 * BATCH)
    assert source.asked == [0, BATCH, 2 * BATCH][: 2 + ahead]


def test_what_takes_less_than_a_thread_costs_is_not_built_ahead_however_short_the_steps_are() -> None:
    assert not pays(0.9 * LEAST_S, 0.0, CPU) and pays(1.1 * LEAST_S, 0.0, CPU)


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["next", "jump", "shard", "size", "same"]), st.integers(0, 5)), min_size=1, max_size=30
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_whatever_is_asked_for_is_what_comes(requests: list[tuple[str, int]]) -> None:
    source = Source()
    data, position, shard, batch = ahead_of(source), 0, 0, BATCH
    for kind, number in requests:
        position = {"next": position + batch, "jump": number * BATCH}.get(kind, position)
        shard, batch = (number if kind == "shard" else shard), (number + 1 if kind == "size" else batch)
        assert taken(source, data, position, shard, batch) == [shard, 2, position, batch]
    assert len(source.asked) <= 2 * len(requests)


def failing_at(position: int, error: BaseException) -> Callable[[int], None]:
    def fails(asked: int) -> None:
        if asked == position:
            raise error

    return fails


@pytest.mark.parametrize("error", [ValueError("no such file"), SystemExit(3)])
def test_an_error_is_raised_at_the_step_that_needs_the_batch(error: BaseException) -> None:
    source = Source(fails=failing_at(2 * BATCH, error))
    data = running(source)
    with pytest.raises(type(error)) as raised:
        data.batch(0, 2, 2 * BATCH, BATCH)
    assert raised.value is error
    with pytest.raises(type(error)):
        data.batch(0, 2, 2 * BATCH, BATCH)
    assert source.by[-1] == "MainThread", "asked again, it is built again"


def test_an_error_of_a_batch_that_nobody_needs_is_nobodys() -> None:
    source = Source(fails=failing_at(2 * BATCH, ValueError("no such file")))
    data = running(source)
    assert taken(source, data, 7 * BATCH) == [0, 2, 7 * BATCH, BATCH]


class Drawing(Source):
    """Draws from a generator that the whole process shares, as a model may."""

    def __init__(self, draw: Callable[[], object]) -> None:
        super().__init__(fails=lambda position: draw() and None)


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), random.random, np.random.rand], ids=["torch", "random", "numpy"]
)
def test_who_draws_from_the_process_s_generators_is_never_asked_ahead(draw: Callable[[], object]) -> None:
    """Otherwise a model with dropout would train on other numbers each time."""
    source = Drawing(draw)
    data = ahead_of(source)
    for step in range(6):
        taken(source, data, step * BATCH)
    assert set(source.by) == {"MainThread"}


def test_a_generator_of_its_own_is_no_reason() -> None:
    running(Drawing(lambda: torch.rand(1, generator=torch.Generator().manual_seed(1))))


def test_no_thread_outlives_its_batch_or_holds_up_the_process() -> None:
    going_on = threading.Event()
    source = Source(fails=lambda position: None if position < 2 * BATCH else going_on.wait(WITHIN_S) and None)
    data = ahead_of(source)
    for step in range(2):
        taken(source, data, step * BATCH)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "prefetch"]
    assert thread.daemon
    going_on.set()
    thread.join(WITHIN_S)
    assert not thread.is_alive()


def test_held_out_data_are_the_sources_own() -> None:
    assert [batch[0].item() for batch in Prefetched(Source(), CPU).held_out(5)] == [5]


def test_training_on_batches_built_ahead_is_bit_for_bit_the_same() -> None:
    run = RunSettings(
        name="x",
        model=ModelSettings(preset="gpt-pico"),
        data=DataSettings(preset="python-stdlib"),
        train=TrainSettings(batch_tokens=128, inner=InnerSettings(lr=1e-2)),
    )
    plain, count = build_data(run), iter(range(10**6))
    ahead = Prefetched(build_data(run), CPU, lambda: float(next(count)))  # every look at the clock is a second later
    replicas = [Replica(run, build_model(run), data, 0, 1) for data in (plain, ahead)]
    positions = [0, 128, 256, 384, 1024, 1152, 0, 128]
    losses = [[replica.step(position, 128, 1e-2) for position in positions] for replica in replicas]
    assert losses[0] == losses[1]
    assert all(torch.equal(tensor, replicas[1].tensors[name]) for name, tensor in replicas[0].tensors.items())
