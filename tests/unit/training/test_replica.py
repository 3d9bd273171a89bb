"""One device's training port: what a step says and takes, and how a fragment is read and written.

A batch in micro-batches: the gradients and the loss of the whole batch, in less memory.

An island that joins counts its tokens by the run's whole sequences.

Batches that are built ahead are the same batches, with the same errors, at the same places.

What is said of a model's state.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.models import MODEL_PRESETS, data_of
from diloco_cli.config.settings import (
    DataSettings,
    InnerSettings,
    Inventory,
    IslandSettings,
    ModelSettings,
    OuterSettings,
    RunSettings,
    StoreSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.errors import RunFailedError, UsageError
from diloco_cli.launch.new_run import layout_of, make_format, shares_here
from diloco_cli.launch.plan_files import islands_of
from diloco_cli.learner.daemon import Newcomer, _island_of, check_batch
from diloco_cli.plan.memory import model_facts
from diloco_cli.plan.planner import make_plan
from diloco_cli.protocol.actors.learner import Progression, Stepped
from diloco_cli.protocol.log.operations import Now, Sleep
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.tasks.build import Batch, build_data, build_model
from diloco_cli.training.inner import clip_gradients, set_learning_rate
from diloco_cli.training.ranks import RankedReplica
from diloco_cli.training.replica import (
    CPU,
    WORTH_BESIDE_ACCELERATOR,
    WORTH_ON_CPU,
    DeviceTraining,
    Prefetched,
    Replica,
    carried_text,
    micro_batch_here,
    micro_batches,
    parameters_of,
)
from tests.numerics.harness import make_run
from tests.numerics.tiny import ROWS
from tests.unit.protocol.records import RUN

AT = Progression(0.5, 3, False)


def port(model: str = "tiny:regression", slowdown: float = 1.0, inner: InnerSettings | None = None) -> DeviceTraining:
    run = make_run(1, 4, SyncSettings(every=4, fragments=2), OuterSettings(), inner or InnerSettings())
    settings = replace(run.settings, model=replace(run.settings.model, entrypoint=f"tests.numerics.{model}"))
    replica = Replica(settings, build_model(settings), build_data(settings), 0, 1)
    return DeviceTraining(run, replica, slowdown)


class RunningMean(nn.Module):
    """Which an evaluator, an export and the other islands would never have."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3), persistent=persistent)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.mean.lerp_(torch.ones(3), 0.1)
        return (self.weight * self.mean).sum() ** 2


@pytest.mark.parametrize("persistent", [True, False])
def test_a_learner_whose_model_was_never_tried_refuses_changed_buffers_at_its_first_step(persistent: bool) -> None:
    training = port()
    replica = Replica(training.replica.settings, RunningMean(persistent), training.replica.data, 0, 1)
    if persistent:
        with pytest.raises(UsageError, match="training changes mean,"):
            replica.step(0, ROWS, 0.1)
    else:
        replica.step(0, ROWS, 0.1)
    assert torch.equal(replica.tensors["weight"], torch.ones(3)) is persistent


def performed(training: DeviceTraining, step_s: float, woken_after_s: float | None = None) -> tuple[Stepped, float]:
    """What a step gives and how long it takes, if the device needs `step_s`; news may end each sleep sooner."""
    now_s, asked, answer = 0.0, 0, None
    steps = training.step(0, ROWS, AT)
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            return stop.value, now_s
        if isinstance(operation, Now):
            now_s += step_s if asked == 1 else 0.0
            asked, answer = asked + 1, now_s
        else:
            assert isinstance(operation, Sleep)
            now_s, answer = now_s + min(operation.seconds, woken_after_s or operation.seconds), None


def test_a_step_tells_its_tokens_and_the_loss_before_it() -> None:
    training = port()
    x, y = training.replica.data.batch(0, 1, 0, ROWS)
    expected = float(training.replica.model(x, y).detach())
    done, _ = performed(training, 0.0)
    assert (done.tokens, done.loss) == (ROWS, pytest.approx(expected))


@pytest.mark.parametrize("woken_after_s", [None, 0.3])
def test_an_emulated_slower_island_takes_so_many_times_as_long_whatever_wakes_it(woken_after_s: float | None) -> None:
    _, seconds = performed(port(slowdown=3.0), 2.0, woken_after_s)
    assert seconds == pytest.approx(6.0)


def test_a_loss_that_is_not_finite_ends_the_run_and_changes_nothing() -> None:
    training = port("loud:not_a_number")
    before = training.read(0)
    with pytest.raises(RunFailedError, match="the loss is nan at token 8 of shard 0"):
        training.train(8, ROWS, AT)
    assert torch.equal(training.read(0), before)


def test_what_is_read_is_a_copy_and_what_is_written_is_read() -> None:
    training = port()
    values, other = training.read(0), training.read(1)
    training.write(0, torch.full_like(values, 2.0))
    assert not torch.equal(values, training.read(0)) and set(training.read(0).tolist()) == {2.0}
    assert torch.equal(training.read(1), other)
    assert values.dtype == torch.float32 and values.shape == (training.run.layout.fragments[0].num_parameters,)


def test_moments_are_saved_as_they_were_and_restored_into_another() -> None:
    first, second = port(), port()
    assert first.save() is None, "no step yet"
    first.train(0, ROWS, AT)
    saved = first.save()
    assert saved is not None and saved.step == 1
    data = saved.encode()
    first.train(ROWS, ROWS, AT)
    assert saved.encode() == data, "they are encoded behind the training"
    assert second.restore(data) and not second.restore(b"something else")
    again = second.save()
    assert again is not None and again.encode() == data
    assert second.reset() and second.save() is None


pytestmark = pytest.mark.usefixtures("one_thread")
SEQUENCES = 8
BATCH = 64 * SEQUENCES  # tokens of gpt-pico's sequences
RELATIVE = 2e-6  # of the largest gradient: float32 sums in another order; up to 4e-7 is what is seen


def settings_of(preset: str, micro: int | str = "auto", batch_tokens: int = BATCH) -> RunSettings:
    return RunSettings(
        name="x",
        model=ModelSettings(preset=preset),
        data=DataSettings(preset=data_of(MODEL_PRESETS[preset])),
        train=TrainSettings(
            tokens=10**9, batch_tokens=batch_tokens, micro_batch_tokens=micro, inner=InnerSettings(lr=1e-2)
        ),  # type: ignore[arg-type]
    )


def replica_of(preset: str, micro: int | None = None) -> Replica:
    run = settings_of(preset)
    return Replica(run, build_model(run), build_data(run), 0, 1, micro_batch_tokens=micro)


def gradients(replica: Replica, tokens: int) -> tuple[dict[str, Tensor], float]:
    replica.optimizer.zero_grad(set_to_none=True)
    loss = replica.backward(0, tokens)
    return {name: p.grad.clone() for name, p in replica.model.named_parameters() if p.grad is not None}, loss


@pytest.mark.parametrize(
    ("preset", "sequences"), [("gpt-pico", 1), ("gpt-pico", 7), ("gpt-nano", 3), ("vit-nano", 3), ("vit-nano", 4)]
)
def test_the_gradients_and_the_loss_are_those_of_the_whole_batch(preset: str, sequences: int) -> None:
    """3 and 7 leave a smaller last micro-batch, which must not count as much as the others."""
    each = MODEL_PRESETS[preset].sequence
    (whole, loss), (divided, its_loss) = (
        gradients(replica_of(preset, micro), SEQUENCES * each) for micro in (None, sequences * each)
    )
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(divided[name], gradient, rtol=0, atol=RELATIVE * largest)
    assert its_loss == pytest.approx(loss, rel=1e-6)


def test_ranks_wait_for_data_as_one_device_does_and_the_mean_of_their_gradients_is_that_of_the_batch() -> None:
    ranks = []
    for rank in range(2):
        run = settings_of("gpt-pico")
        ranks.append(RankedReplica(run, build_model(run), build_data(run), 0, 1, rank=rank, ranks=2))
        assert ranks[-1].data_s is None
    (whole, loss), *found = (gradients(replica, BATCH) for replica in (replica_of("gpt-pico"), *ranks))
    assert sum(part for _, part in found) == pytest.approx(loss, rel=1e-6)
    for name, gradient in whole.items():
        mean = (found[0][0][name] + found[1][0][name]) / 2
        torch.testing.assert_close(mean, gradient, rtol=0, atol=RELATIVE * float(gradient.abs().max()) + 1e-7)
    assert all(replica.data_s == 0.0 and replica.passed == 1.0 for replica in ranks), "the first batch opens the data"
    ranks[0].backward(BATCH, BATCH)
    assert ranks[0].data_s > 0.0


def test_an_experts_balance_is_taken_of_each_micro_batch_and_the_reported_loss_stays() -> None:
    """The auxiliary term is no mean over tokens: its gradient differs a little, that of the loss does not."""
    (whole, loss), (divided, its_loss) = (gradients(replica_of("moe-pico", micro), BATCH) for micro in (None, 3 * 64))
    assert its_loss == pytest.approx(loss, rel=1e-6)
    off = max(float((divided[name] - whole[name]).norm() / whole[name].norm()) for name in whole)
    assert 1e-5 < off < 0.05


class Rows(nn.Module):
    """Mean of weight * x, and an auxiliary term of 10 * weight; remembers how many rows it saw at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.seen: list[int] = []

    def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(len(x))
        return self.weight * x.mean(), 10 * self.weight


class Fixed:
    def __init__(self, inputs: Tensor, targets: Tensor | None = None) -> None:
        self.inputs, self.targets = inputs, inputs if targets is None else targets

    def batch(self, *_: int) -> Batch:
        return self.inputs, self.targets


def rows_of(inputs: Tensor, micro: int | None, **inner: object) -> Replica:
    settings = RunSettings("x", train=TrainSettings(inner=InnerSettings(clip_norm=0.0, **inner)))  # type: ignore[arg-type]
    return Replica(settings, Rows(), Fixed(inputs), 0, 1, micro_batch_tokens=micro)  # type: ignore[arg-type]


@pytest.mark.parametrize(("micro", "seen"), [(3, [3, 3, 1]), (None, [7])])
def test_an_auxiliary_term_is_trained_on_once_in_all_and_is_in_no_reported_loss(
    micro: int | None, seen: list[int]
) -> None:
    replica = rows_of(torch.arange(7.0), micro, name="sgd")
    assert replica.step(0, 7, lr=0.1) == pytest.approx(3.0)
    assert replica.gradient_norm == pytest.approx(3.0 + 10.0)
    assert float(replica.model.weight.detach()) == pytest.approx(1.0 - 0.1 * 13)
    assert replica.model.seen == seen


@pytest.mark.parametrize(
    ("rows", "batch_tokens", "micro", "seen"),
    [
        (8, 512, 64, [1] * 8),
        (8, 512, 192, [3, 3, 2]),
        (8, 512, 100, [1] * 8),
        (2, 512, 64, [1, 1]),  # a row of more tokens than a micro-batch is the least there is
        (1, 512, 64, [1]),
        (8, 512, 512, [8]),
        (8, 512, 10**9, [8]),
        (8, 512, None, [8]),
        (8, 256, 64, [2] * 4),  # rows of 32 tokens
    ],
)
def test_a_batch_is_divided_by_whole_examples(rows: int, batch_tokens: int, micro: int | None, seen: list[int]) -> None:
    replica = rows_of(torch.ones(rows), micro)
    replica.step(0, batch_tokens, lr=0.0)
    assert replica.model.seen == seen


def test_shares_follow_the_targets_and_add_up_to_one() -> None:
    batch = torch.zeros(7, 5), torch.zeros(7, 2)
    parts = list(micro_batches(batch, 70, 30))
    assert [share for _, share in parts] == [3 / 7, 3 / 7, 1 / 7]
    assert [inputs.shape for (inputs, _), _ in parts] == [(3, 5), (3, 5), (1, 5)]


@pytest.mark.parametrize(("inputs", "targets"), [((4, 2), (3,)), ((), (4,)), ((4,), ())])
def test_a_batch_whose_examples_cannot_be_told_apart_is_refused_only_if_it_must_be_divided(
    inputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    batch = torch.zeros(inputs), torch.zeros(targets)
    assert list(micro_batches(batch, 64, None)) == [(batch, 1.0)]
    with pytest.raises(UsageError, match="cannot be divided into micro-batches") as refused:
        list(micro_batches(batch, 64, 16))
    assert refused.value.hint == "--set train.micro_batch_tokens=64 takes whole batches"


@pytest.mark.parametrize(("place", "micro"), [(0, 3), (4, 3), (6, 3), (4, None)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_micro_batch_that_is_not_finite_changes_nothing(place: int, micro: int | None, value: float) -> None:
    inputs = torch.arange(7.0)
    replica = rows_of(inputs, micro)
    replica.step(0, 7, lr=0.1)
    before = {name: tensor.detach().clone() for name, tensor in replica.tensors.items()}
    moments = {k: v.clone() for k, v in replica.optimizer.state[replica.model.weight].items()}
    inputs[place] = value
    loss = replica.step(0, 7, lr=0.1)
    assert not isfinite(loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in replica.tensors.items())
    assert all(torch.equal(replica.optimizer.state[replica.model.weight][k], v) for k, v in moments.items())


# -- a batch of one micro-batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "micro"), [("gpt-pico", None), ("gpt-pico", BATCH), ("moe-pico", 10 * BATCH)])
def test_a_batch_of_one_micro_batch_is_computed_bit_for_bit_as_it_always_was(preset: str, micro: int | None) -> None:
    replica, reference = replica_of(preset, micro), replica_of(preset)
    for step in range(3):
        tokens, targets = reference.data.batch(0, 1, step * BATCH, BATCH)
        reference.optimizer.zero_grad(set_to_none=True)
        output = reference.model(tokens, targets)
        terms = output if isinstance(output, tuple) else (output,)
        (terms[0] if len(terms) == 1 else terms[0] + terms[1]).backward()
        norm = float(clip_gradients(reference.model, 1.0))
        set_learning_rate(reference.optimizer, 1e-2)
        reference.optimizer.step()
        assert replica.step(step * BATCH, BATCH, 1e-2) == float(terms[0].detach())
        assert replica.gradient_norm == norm
    assert all(torch.equal(replica.tensors[name], tensor) for name, tensor in reference.tensors.items())


# -- memory -----------------------------------------------------------------------------------------------------------


class Kept:
    """A tensor that autograd keeps until the backward pass has used it."""

    now = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.size = tensor, tensor.nbytes
        Kept.now += self.size
        Kept.most = max(Kept.most, Kept.now)

    def __del__(self) -> None:
        Kept.now -= self.size


def max_kept(step: Callable[[], object]) -> int:
    """Bytes that autograd keeps at once for backward passes, at most."""
    Kept.now = Kept.most = 0
    with saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        step()
    return Kept.most


def test_what_is_kept_for_the_backward_pass_falls_with_the_micro_batch() -> None:
    kept = {n: max_kept(lambda n=n: replica_of("gpt-pico", 64 * n).step(0, BATCH, 1e-3)) for n in (8, 4, 2, 1)}  # type: ignore[misc]
    weights = 2 * kept[4] - kept[8]  # they are kept too, whatever the micro-batch
    for n in (2, 1):
        assert kept[n] - weights == pytest.approx((kept[8] - weights) * n / 8, rel=0.02)
    assert weights < kept[8] / 4


# -- the plan, the launch, the learner, one that joins ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "micro", "batch_tokens"),
    [("gpt-nano", "auto", 524_288), ("vit-nano", "auto", 1024), ("moe-nano", 256, 1024), ("gpt-micro", 4096, 1024)],
)
def test_the_plan_the_launch_and_an_island_that_joins_agree(preset: str, micro: int | str, batch_tokens: int) -> None:
    run = settings_of(preset, micro, batch_tokens)
    inventory = Inventory(StoreSettings("bucket"), (IslandSettings("here", "us", Accelerators("cpu", 2)),))
    plan = make_plan(run, inventory, model_facts(run.model))
    launched = make_format(plan.run, plan.inventory, "file:///bucket", islands_of(plan, shares_here(plan, None)[0]))
    joining = _island_of(launched, "file:///bucket", "spot", None, Newcomer())
    planned = plan.islands[0].micro_batch_tokens
    assert launched.islands[0].micro_batch_tokens == joining.micro_batch_tokens == planned
    assert planned == {256: 256, 4096: 1024}.get(micro, planned) and 0 < planned <= batch_tokens  # type: ignore[operator,call-overload]


@pytest.mark.parametrize(("asked", "sharding"), [("auto", "ddp"), ("ddp", "ddp"), ("fsdp", "fsdp")])
def test_the_ranks_of_an_island_reach_the_runs_format(asked: Literal["auto", "ddp", "fsdp"], sharding: str) -> None:
    """Of two nodes with two ranks each on a CPU; an island that joins with two ranks decides by the same rule."""
    run = settings_of("gpt-nano", "auto", 4096)
    run = replace(run, train=replace(run.train, sharding=asked))
    island = IslandSettings("here", "us", Accelerators("cpu", 3), nodes=2, ranks=2)
    plan = make_plan(run, Inventory(StoreSettings("bucket"), (island,)), model_facts(run.model))
    launched = make_format(plan.run, plan.inventory, "file:///bucket", islands_of(plan, shares_here(plan, None)[0]))
    one = launched.islands[0]
    assert (one.num_accelerators, one.nodes, one.ranks, one.sharding) == (6, 2, 4, sharding)
    assert one.micro_batch_tokens == 4096 // 4
    joining = _island_of(launched, "file:///bucket", "spot", None, Newcomer(ranks=2))
    assert (joining.ranks, joining.sharding, joining.micro_batch_tokens) == (2, sharding, 4096 // 2)


def test_a_model_of_ones_own_gets_a_micro_batch_from_its_tensors() -> None:
    """Its data say how long a sequence is; where nothing does, tokens are counted one by one."""
    own = replace(
        settings_of("gpt-pico"),
        model=ModelSettings(entrypoint="tests.numerics.tiny:regression"),
        data=DataSettings(entrypoint="tests.numerics.tiny:stream"),
    )
    tokens, fit = micro_batch_here(own, parameters_of(layout_of(own)), 2, 24, CPU)
    assert (tokens, fit.sharding) == (24, "none")
    large = 10**9
    assert 1 <= micro_batch_here(own, parameters_of(layout_of(own)), 2, large, CPU)[0] < large


def run_of(model: ModelSettings, data: DataSettings) -> RunFormat:
    return replace(RUN, settings=replace(RUN.settings, model=model, data=data))


PICO = run_of(ModelSettings(preset="gpt-pico"), DataSettings(preset="python-stdlib"))


@pytest.mark.parametrize(("batch", "offered"), [(100, 128), (1, 64), (1000, 1024)])
def test_half_a_sequence_is_refused_with_the_nearest_number_that_fits(batch: int, offered: int) -> None:
    with pytest.raises(UsageError, match="multiple of the run's sequence length, 64") as refused:
        check_batch(PICO, batch)
    assert refused.value.hint == f"--batch-tokens {offered}"


def test_whole_sequences_pass_and_so_does_what_only_a_users_code_can_tell() -> None:
    check_batch(PICO, 640)
    own = run_of(
        ModelSettings(entrypoint="tests.numerics.tiny:slope"), DataSettings(entrypoint="tests.numerics.tiny:stream")
    )
    check_batch(own, 7)


TOKENS = 8
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


def taken(source: Source, data: Prefetched, position: int, shard: int = 0, batch: int = TOKENS) -> list[int]:
    """A batch as a training thread takes it: then comes a step."""
    found = data.batch(shard, 2, position, batch)[0].tolist()
    source.now_s += STEP_S
    return found


def ahead_of(source: Source, device: str = "cpu") -> Prefetched:
    return Prefetched(source, torch.device(device), lambda: source.now_s)


def running(source: Source, steps: int = 2) -> Prefetched:
    """After some steps, the batch at `steps` x TOKENS being built ahead, and built."""
    data = ahead_of(source)
    for step in range(steps):
        taken(source, data, step * TOKENS)
    wait_for(source, steps * TOKENS)
    return data


def wait_for(source: Source, position: int) -> None:
    assert source.built.setdefault(position, threading.Event()).wait(WITHIN_S), "it was not built ahead"


def test_the_next_batch_is_there_before_it_is_asked_for() -> None:
    """The first one is not known to take long before there was a step to compare with."""
    source = Source()
    data = running(source)
    assert source.asked == [0, TOKENS, 2 * TOKENS]
    assert source.by == ["MainThread", "MainThread", "prefetch"]
    assert taken(source, data, 2 * TOKENS) == [0, 2, 2 * TOKENS, TOKENS]
    wait_for(source, 3 * TOKENS)
    assert source.asked == [0, TOKENS, 2 * TOKENS, 3 * TOKENS], "each once, and no more than one ahead"


@pytest.mark.parametrize(("device", "worth"), [("cpu", WORTH_ON_CPU), ("cuda", WORTH_BESIDE_ACCELERATOR)])
@pytest.mark.parametrize("ahead", [False, True])
def test_only_what_takes_a_good_part_of_a_step_is_built_ahead(device: str, worth: float, ahead: bool) -> None:
    source = Source(build_s=(1.1 if ahead else 0.9) * worth * STEP_S)
    data = ahead_of(source, device)
    taken(source, data, 0)
    taken(source, data, TOKENS)
    if ahead:
        wait_for(source, 2 * TOKENS)
    assert source.asked == [0, TOKENS, 2 * TOKENS][: 2 + ahead]


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["next", "jump", "shard", "size", "same"]), st.integers(0, 5)), min_size=1, max_size=30
)


@settings(max_examples=60)
@given(REQUESTS)
def test_whatever_is_asked_for_is_what_comes(requests: list[tuple[str, int]]) -> None:
    source = Source()
    data, position, shard, batch = ahead_of(source), 0, 0, TOKENS
    for kind, number in requests:
        position = {"next": position + batch, "jump": number * TOKENS}.get(kind, position)
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
    source = Source(fails=failing_at(2 * TOKENS, error))
    data = running(source)
    with pytest.raises(type(error)) as raised:
        data.batch(0, 2, 2 * TOKENS, TOKENS)
    assert raised.value is error
    with pytest.raises(type(error)):
        data.batch(0, 2, 2 * TOKENS, TOKENS)
    assert source.by[-1] == "MainThread", "asked again, it is built again"


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
        taken(source, data, step * TOKENS)
    assert set(source.by) == {"MainThread"}


def test_no_thread_outlives_its_batch_or_holds_up_the_process() -> None:
    going_on = threading.Event()
    source = Source(fails=lambda position: None if position < 2 * TOKENS else going_on.wait(WITHIN_S) and None)
    data = ahead_of(source)
    for step in range(2):
        taken(source, data, step * TOKENS)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "prefetch"]
    assert thread.daemon
    going_on.set()
    thread.join(WITHIN_S)
    assert not thread.is_alive()


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


class TiedAndNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.out = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8)
        self.out.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("mask", torch.zeros(3))


def test_what_is_carried_and_what_is_not() -> None:
    with torch.device("meta"):
        model = TiedAndNormed()
    assert carried_text(model, ()) == (
        "carried: 48 parameters in 4 tensors (1 tied); as the model's code makes them, not exchanged: 1 frozen tensors,"
        " 4 buffers"
    )
    some = carried_text(model, {"norm.running_mean", "norm.running_var"})
    assert ", 2 buffers (such as norm.running_mean); " in some and some.endswith("1 frozen tensors, 2 buffers")
