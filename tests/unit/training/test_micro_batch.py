"""A batch in micro-batches: the gradients and the loss of the whole batch, in less memory.

An island that joins counts its tokens by the run's whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from diloco_cli.config.codec import replace
from diloco_cli.config.presets import MODEL_PRESETS, data_of
from diloco_cli.config.settings import (
    Accelerators,
    DataSettings,
    InnerSettings,
    Inventory,
    IslandSettings,
    ModelSettings,
    RunSettings,
    StoreSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.errors import UsageError
from diloco_cli.launch.new_run import islands_of, layout_of, make_format, shares_here
from diloco_cli.learner.daemon import Newcomer, _island_of, check_batch
from diloco_cli.plan.model_facts import model_facts
from diloco_cli.plan.planner import make_plan
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.tasks.build import Batch, build_data, build_model
from diloco_cli.training.inner import clip_gradients, set_learning_rate
from diloco_cli.training.replica import CPU, Replica, micro_batch_here, micro_batches, parameters_of
from tests.unit.protocol.records import RUN

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


@pytest.mark.parametrize("preset", ["gpt-pico", "gpt-nano", "vit-nano"])
@pytest.mark.parametrize("sequences", [1, 3, 4, 7], ids=lambda n: f"{n}_of_8")
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


def test_a_mean_of_means_would_be_noticed() -> None:
    """The tolerance of the test above tells a wrong weight of the last micro-batch from rounding."""
    replica = replica_of("gpt-pico")
    whole, _ = gradients(replica, BATCH)
    batch = replica.data.batch(0, 1, 0, BATCH)
    replica.optimizer.zero_grad()
    for (tokens, targets), _ in micro_batches(batch, BATCH, 3 * 64):
        (replica.model(tokens, targets) / 3).backward()
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    off = max(float((p.grad - whole[name]).abs().max()) for name, p in replica.model.named_parameters())
    assert off > 100 * RELATIVE * largest


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


@pytest.mark.parametrize("preset", ["gpt-pico", "moe-pico"])
@pytest.mark.parametrize("micro", [None, BATCH, 10 * BATCH])
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


@pytest.mark.parametrize("preset", ["gpt-nano", "gpt-micro", "moe-nano", "vit-nano"])
@pytest.mark.parametrize(("micro", "batch_tokens"), [("auto", 524_288), ("auto", 1024), (256, 1024), (4096, 1024)])
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


def test_the_tensors_of_a_layout_are_the_models_each_once() -> None:
    run = settings_of("gpt-pico")
    cut = layout_of(replace(run, sync=SyncSettings(fragments=24, split_rows=True)))
    assert sum(len(fragment.tensors) for fragment in cut.fragments) > len(parameters_of(cut))
    expected = {name: tuple(p.shape) for name, p in build_model(run).named_parameters()}
    assert {fact.name: fact.shape for fact in parameters_of(cut)} == expected


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
