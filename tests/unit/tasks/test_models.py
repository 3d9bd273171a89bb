"""The built-in models, and what is done to any model block by block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from diloco_cli.config.codec import replace
from diloco_cli.config.models import (
    MODEL_PRESETS,
    VISION_DATA,
    GPTShape,
    MoEShape,
    ViTShape,
    data_of,
    facts_from_parameters,
)
from diloco_cli.config.settings import DataSettings, InnerSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.errors import UsageError
from diloco_cli.launch.plan_files import facts_of
from diloco_cli.plan.memory import Computing, fit_with_micro_batch, model_facts
from diloco_cli.tasks.build import build_data, build_model, build_model_on_meta, losses_of
from diloco_cli.tasks.models import (
    BALANCE_COEFFICIENT,
    MoEBlock,
    MoEGPT,
    balance_loss,
    blocks_of,
    build,
    check_blocks,
    check_sharded,
    route,
)
from diloco_cli.tasks.models import build as build_vit
from diloco_cli.tensors.flat import parameter_facts
from diloco_cli.training.replica import Replica
from tests.numerics.tiny import Regression

SMALL = [name for name, shape in MODEL_PRESETS.items() if shape.num_parameters < 1_000_000]


def run_of(preset: str, precision: str = "fp32") -> RunSettings:
    train = TrainSettings(batch_tokens=128, precision=precision, inner=InnerSettings(lr=3e-3))  # type: ignore[arg-type]
    return RunSettings(
        name="x",
        model=ModelSettings(preset=preset),
        data=DataSettings(preset=data_of(MODEL_PRESETS[preset])),
        train=train,
    )


class OneBatch:
    """The same two examples at every position."""

    def __init__(self, preset: str) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = MODEL_PRESETS[preset]
        if isinstance(shape, ViTShape):
            self.pair = torch.randn(2, 8, 8, generator=generator), torch.tensor([3, 7])
        else:
            both = torch.randint(256, (2, shape.sequence + 1), generator=generator)
            self.pair = both[:, :-1], both[:, 1:]

    def batch(self, *_):
        return self.pair


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_a_built_preset_has_the_facts_that_its_shape_gives(preset):
    model = build_model_on_meta(run_of(preset))
    shape, known = MODEL_PRESETS[preset], model_facts(ModelSettings(preset=preset))
    built = facts_from_parameters(parameter_facts(model), shape.sequence)
    assert (built.parameters, built.num_tensors) == (known.parameters, known.num_tensors)
    assert (built.layers, built.embedding_parameters) == (known.layers, known.embedding_parameters)
    assert built.width == known.width
    assert known.flops_per_token == 6 * shape.active_parameters + 12 * shape.layers * shape.width * shape.sequence


@pytest.mark.parametrize("preset", SMALL)
def test_a_preset_learns_a_batch_by_heart(preset):
    run = run_of(preset)
    replica = Replica(run, build_model(run), OneBatch(preset), 0, 1)  # type: ignore[arg-type]
    losses = [replica.step(0, 128, 3e-3) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.3, losses
    assert replica.gradient_norm > 0


@pytest.mark.parametrize("preset", ["gpt-pico", "moe-pico", "vit-nano"])
def test_bf16_changes_the_loss_a_little_and_no_type_that_is_kept(preset):
    losses = {}
    for precision in ("fp32", "bf16"):
        run = run_of(preset, precision)
        replica = Replica(run, build_model(run), OneBatch(preset), 0, 1)  # type: ignore[arg-type]
        losses[precision] = [replica.step(0, 128, 1e-3) for _ in range(3)]
        kept = list(replica.model.parameters())
        kept += [p.grad for p in kept if p.grad is not None]
        kept += [state[key] for state in replica.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03)


def test_patches_are_cut_row_by_row():
    shape = ViTShape(layers=1, width=4, heads=1, image=4, patch=2)
    model, seen = build_vit(shape), []
    model.patch_in.register_forward_hook(lambda _m, inputs, _out: seen.append(inputs[0]))
    model.logits(torch.arange(16.0).view(1, 4, 4))
    assert seen[0][0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_sequences_longer_than_the_positions_are_refused_with_both_numbers():
    model = build_model(run_of("gpt-pico"))
    tokens = torch.zeros(1, MODEL_PRESETS["gpt-pico"].sequence + 1, dtype=torch.int64)
    with pytest.raises(UsageError, match="65 tokens are longer than the model's 64 positions"):
        model(tokens, tokens)


def test_unknown_presets_name_the_nearest():
    run = run_of("gpt-pico")
    with pytest.raises(UsageError, match=r"did you mean.*gpt-nano"):
        build_model(replace(run, model=ModelSettings(preset="gpt-nanno")))
    with pytest.raises(UsageError, match=f"did you mean {VISION_DATA}"):
        build_data(replace(run, data=DataSettings(preset="digit")))


SHAPE = MoEShape(layers=2, width=16, heads=2, sequence=8, experts=5, active_experts=2, expert_width=12)


def block(seed: int = 0) -> MoEBlock:
    torch.manual_seed(seed)
    return MoEBlock(SHAPE).double()


def tokens_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randint(256, (3, SHAPE.sequence + 1), generator=torch.Generator().manual_seed(1))
    return both[:, :-1], both[:, 1:]


@settings(max_examples=50)
@given(st.integers(1, 20), st.integers(2, 8), st.integers(0, 2**31), st.floats(0.1, 50.0))
def test_weights_of_the_chosen_experts_sum_to_one_and_they_are_the_likeliest(n, experts, seed, scale):
    logits = scale * torch.randn(n, experts, generator=torch.Generator().manual_seed(seed))
    chosen, weights, probabilities = route(logits, 2)
    assert torch.allclose(weights.sum(dim=1), torch.ones(n)) and bool((weights >= 0).all())
    least = logits.gather(1, chosen).min(dim=1).values
    assert int((logits > least[:, None]).sum()) <= n, "besides the two chosen, nobody is above the second"
    shares = probabilities.gather(1, chosen)
    torch.testing.assert_close(weights, shares / shares.sum(dim=1, keepdim=True))


def test_a_mixture_is_the_weighted_sum_of_its_experts_token_by_token():
    layer = block()
    tokens = torch.randn(7, SHAPE.width, dtype=torch.float64)
    chosen, weights, _ = route(layer.router(tokens), 2)
    expected = torch.stack(
        [sum(w * layer.experts[e](t) for e, w in zip(es, ws, strict=True))
         for t, es, ws in zip(tokens, chosen.tolist(), weights, strict=True)]
    )  # fmt: skip
    torch.testing.assert_close(layer.mix(tokens, chosen, weights), expected, rtol=1e-12, atol=1e-12)


def test_the_balance_loss_of_one_crowded_expert_by_hand():
    """All four tokens choose expert 0 of two, with probability 0.75: f = (1, 0), P = (0.75, 0.25), E f.P = 1.5."""
    probabilities = torch.tensor([[0.75, 0.25]] * 4)
    assert float(balance_loss(torch.zeros(4, 1, dtype=torch.int64), probabilities)) == 1.5


def test_the_balance_term_is_trained_on_and_never_reported():
    torch.manual_seed(0)
    model = build(SHAPE)
    assert isinstance(model, MoEGPT)
    reported, objective = losses_of(model(*tokens_and_targets()))
    model.eval()
    plain = model(*tokens_and_targets())
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(reported, plain)
    assert float((objective - reported).detach()) >= 0.5 * BALANCE_COEFFICIENT


def test_the_router_works_in_float32_under_bf16(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    layer, seen = MoEBlock(SHAPE), []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *a: seen.append(linear(*a)) or seen[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(2, 8, SHAPE.width))
    router = [out for out in seen if out.shape[-1] == SHAPE.experts]
    assert [out.dtype for out in router] == [torch.float32]
    assert any(out.dtype == torch.bfloat16 for out in seen), "the experts themselves are in bfloat16"


@pytest.mark.parametrize("preset", [name for name in MODEL_PRESETS if name.startswith("moe")])
def test_active_parameters_are_counted_from_the_model(preset):
    shape = MODEL_PRESETS[preset]
    with torch.device("meta"):
        model = build(shape)
    idle_a_layer = sum(p.numel() for p in model.blocks[0].experts[0].parameters())
    total = sum(p.numel() for p in model.parameters())
    idle = shape.layers * (shape.experts - shape.active_experts) * idle_a_layer
    assert (shape.num_parameters, shape.active_parameters) == (total, total - idle)


GPT = GPTShape(layers=3, width=16, heads=2, sequence=8, vocabulary=32)
MOE = MoEShape(layers=2, width=16, heads=2, sequence=8, vocabulary=32, experts=4, active_experts=2, expert_width=8)
TRAIN = TrainSettings(batch_tokens=32, micro_batch_tokens=16, precision="fp32")


class Dropping(nn.Module):
    """Layers of a user's own with dropout, beside a list of plain heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)
        )
        self.heads = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = sum(head(x) for head in self.heads)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Tokens:
    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(32, (batch_tokens // 8, 9), generator=torch.Generator().manual_seed(position))
        return drawn[:, :-1], drawn[:, 1:]

    def held_out(self, num_sequences: int):
        raise NotImplementedError


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return Dropping() if kind == "own" else build({"gpt": GPT, "moe": MOE}[kind])


def trained(kind: str, train: TrainSettings) -> tuple[Replica, list[float]]:
    replica = Replica(RunSettings(name="x", train=train), model_of(kind), Tokens(), 0, 1)
    return replica, [replica.step(32 * step, 32, 0.01) for step in range(3)]


def saved_elements(replica: Replica) -> int:
    """What autograd keeps for the backward pass."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        replica.model(*replica.data.batch(0, 1, 0, 32))
    return kept


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt", "moe", "own"])
def test_with_checkpointing_training_is_the_same_bit_for_bit_and_keeps_less(kind: str, precision: str) -> None:
    train = replace(TRAIN, precision=precision)  # type: ignore[arg-type]
    plain, losses = trained(kind, train)
    again, same = trained(kind, replace(train, checkpointing=True))
    assert losses == same and list(plain.tensors) == list(again.tensors)
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in plain.tensors.items())
    assert saved_elements(again) < 0.5 * saved_elements(plain)


def test_blocks_are_the_members_of_outermost_lists_that_have_parts() -> None:
    for shape in (GPT, MOE, ViTShape(layers=2, width=16, heads=2)):
        model = build(shape)
        assert blocks_of(model) == list(model.blocks)  # type: ignore[arg-type]
    own = Dropping()
    assert blocks_of(nn.ModuleDict({"inner": own})) == list(own.layers)


def test_only_a_model_whose_blocks_share_nothing_is_sharded_and_the_plan_knows(tmp_path) -> None:
    check_sharded(build(GPT))
    sharing = Dropping()
    sharing.layers[1][0].weight = sharing.layers[0][0].weight
    for model in (Regression(), sharing):
        with pytest.raises(UsageError, match="cannot be sharded block by block") as refused:
            check_sharded(model)
        assert "train.sharding=ddp" in (refused.value.hint or "")
    run = RunSettings(name="x", model=ModelSettings(entrypoint="tests.numerics.tiny:regression"), train=TRAIN)
    facts = facts_of(run.with_consent(True), tmp_path)
    huge = replace(facts, parameters=10**9)
    fit = fit_with_micro_batch(TRAIN, huge, 32, Computing(num_fragments=2), ranks=2, memory_gb=12.0)
    assert (fit.sharding, fit.fits, fit.devices_needed, fit.settings) == ("ddp", False, None, ())
    layered = replace(huge, divides=True, layers=100)
    assert fit_with_micro_batch(TRAIN, layered, 32, Computing(num_fragments=4), ranks=2, memory_gb=12.0).fits
    asked = replace(TRAIN, sharding="fsdp")
    fit = fit_with_micro_batch(asked, facts, 32, Computing(num_fragments=2), ranks=2, memory_gb=12.0)
    assert fit.sharding == "ddp", "a copy on each, whatever is asked for"


def test_a_model_without_blocks_cannot_checkpoint_and_the_plan_says_so(tmp_path) -> None:
    train = replace(TRAIN, checkpointing=True)
    check_blocks(Regression(), TRAIN)
    with pytest.raises(UsageError, match="Regression has no blocks") as refused:
        check_blocks(Regression(), train)
    assert refused.value.where == "train.checkpointing" and "checkpointing=false" in (refused.value.hint or "")
    run = RunSettings(name="x", model=ModelSettings(entrypoint="tests.numerics.tiny:regression"), train=train)
    with pytest.raises(UsageError, match="has no blocks"):
        facts_of(run.with_consent(True), tmp_path)


def test_each_block_is_compiled_or_the_whole_model_if_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward.__self__) or forward)
    for model, parts in ((own := Dropping(), list(own.layers)), (plain := Regression(), [plain])):
        compiled.clear()
        names = [name for name, _ in model.named_parameters()]
        replica = Replica(RunSettings(name="x", train=replace(TRAIN, compile=True)), model, Tokens(), 0, 1)
        assert compiled == parts and list(replica.tensors) == names
