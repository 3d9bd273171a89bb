"""A model's blocks, and training with activations that are computed again: bit for bit what it is without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from diloco_cli.config.presets import GPTShape, MoEShape, ViTShape
from diloco_cli.config.settings import ModelSettings, RunSettings, TrainSettings
from diloco_cli.errors import UsageError
from diloco_cli.launch.plan_files import facts_of
from diloco_cli.plan.memory import Computing, fit_with_micro_batch
from diloco_cli.tasks.blocks import blocks_of, check_blocks, check_sharded
from diloco_cli.tasks.models import build
from diloco_cli.training.replica import Replica
from tests.numerics.tiny import Regression

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
    facts = facts_of(replace(run, consented=True), tmp_path)
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
        facts_of(replace(run, consented=True), tmp_path)


def test_each_block_is_compiled_or_the_whole_model_if_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward.__self__) or forward)
    for model, parts in ((own := Dropping(), list(own.layers)), (plain := Regression(), [plain])):
        compiled.clear()
        names = [name for name, _ in model.named_parameters()]
        replica = Replica(RunSettings(name="x", train=replace(TRAIN, compile=True)), model, Tokens(), 0, 1)
        assert compiled == parts and list(replica.tensors) == names
