"""From a model to flat vectors and back.

A model wrapped by compile, checkpointing or DDP has the layout, the moments and the export names of the bare one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings, ModelSettings, OuterSettings, RunSettings, SyncSettings
from diloco_cli.launch.new_run import layout_of
from diloco_cli.layout import balanced_layout, make_layout
from diloco_cli.tasks.build import build_model_on_meta
from diloco_cli.tensors.flat import bare_parameters, flatten, parameter_facts, unflatten
from diloco_cli.training.inner import build_optimizer, restore_inner_state, saved_moments
from tests.numerics.harness import make_run
from tests.numerics.tiny import Regression


class Tied(nn.Module):
    """An embedding whose weights are the output head's, a frozen tensor and a buffer."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        head.weight = embedding.weight
        for name in ("head", "embedding") if head_first else ("embedding", "head"):
            setattr(self, name, head if name == "head" else embedding)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("counter", torch.zeros(1))
        self.body = nn.Linear(4, 4)


def test_tied_weights_appear_once_and_count_as_an_embedding_whoever_names_them() -> None:
    for head_first in (False, True):
        facts = parameter_facts(Tied(head_first))
        assert sorted(fact.shape for fact in facts) == [(4,), (4, 4), (7, 4)]
        assert [fact.shape for fact in facts if fact.embedding] == [(7, 4)]


def test_gathering_copies_and_converts() -> None:
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    layout = balanced_layout(parameter_facts(model), 1)
    flat = flatten(layout.fragments[0], dict(model.named_parameters()))
    flat.zero_()
    assert flat.dtype == torch.float32 and bool((model.weight != 0).any())


def test_the_layout_tells_types_apart_and_holds_trained_parameters_alone() -> None:
    def digest_of(dtype: torch.dtype) -> str:
        return balanced_layout(parameter_facts(torch.nn.Linear(3, 2).to(dtype)), 1).digest

    assert digest_of(torch.float32) != digest_of(torch.bfloat16) != digest_of(torch.float16)
    frozen = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    frozen[0].weight.requires_grad_(False)
    assert [fact.name for fact in parameter_facts(frozen)] == ["0.bias", "1.weight", "1.bias"]


class Gpt(nn.Module):
    """Positions, whose number is the width, are an embedding too; the head is tied, untied, or not the last."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(12, 6), nn.Embedding(6, 6)
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        if head != "none":
            self.head = nn.Linear(6, 12)
        if head == "tied":
            self.head.weight = self.tokens.weight


class Mixed(nn.Module):
    """A block with every kind of matrix and what looks like one, and the like of it outside."""

    def __init__(self) -> None:
        super().__init__()
        self.cls, self.table = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(5, 4))
        self.patches, self.score = nn.Linear(9, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6))
        self.stages = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.BatchNorm1d(4))
        block = nn.Module()
        block.attention, block.up, block.one = nn.MultiheadAttention(4, 2), nn.Linear(4, 8), nn.Linear(4, 1)
        block.gate, block.glu = nn.Linear(4, 3), nn.ModuleDict({"gate": nn.Linear(4, 8)})
        block.bias_table, block.positions = nn.Parameter(torch.ones(3, 4)), nn.Embedding(5, 4)
        self.layers, self.heads = nn.ModuleList([block]), nn.ModuleList([nn.Linear(4, 9), nn.Linear(4, 9)])


def hidden_in(model: nn.Module) -> list[str]:
    return [fact.name for fact in parameter_facts(model) if fact.hidden]


def test_hidden_matrices_are_those_of_linear_layers_in_blocks() -> None:
    assert hidden_in(Mixed()) == [
        "stages.0.0.weight", "stages.1.0.weight", "layers.0.attention.in_proj_weight",
        "layers.0.attention.out_proj.weight", "layers.0.up.weight", "layers.0.glu.gate.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("preset", ["gpt-pico", "moe-pico", "vit-nano"])
def test_of_a_preset_only_its_blocks_matrices_are_hidden(preset: str) -> None:
    model = build_model_on_meta(RunSettings("run", model=ModelSettings(preset=preset)))
    names = {"qkv", "attention_out", "mlp_in", "mlp_out"}
    assert hidden_in(model) == [name for name, _ in model.named_parameters() if name.split(".")[-2:][0] in names]


def test_of_models_of_transformers_too() -> None:
    """A classifier's head, which is no embedding's size, is none."""
    transformers = pytest.importorskip("transformers", reason="pip install 'diloco[hf]'")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(vocab_size=32, **sizes))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=32))
    for model, count, at in ((llama, 7, "model.layers.0."), (gpt2, 4, "transformer.h.0.")):
        matrices = [name for name, p in model.named_parameters() if name.startswith(at) and p.dim() > 1]
        assert hidden_in(model) == matrices and len(matrices) == count


@pytest.mark.parametrize(("model", "fragments"), [(Tied(False), 1), (Gpt("untied"), 7)])
def test_scatter_undoes_gather_in_place(model: nn.Module, fragments: int) -> None:
    layout, tensors = balanced_layout(parameter_facts(model), fragments), dict(model.named_parameters())
    slots = [slot for fragment in layout.fragments for slot in fragment.tensors]
    assert any(slot.rows for slot in slots) is (fragments > 1)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    flats = [flatten(fragment, tensors) for fragment in layout.fragments]
    assert sum(flat.numel() for flat in flats) == sum(before[name].numel() for name in {slot.name for slot in slots})
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(1.0)
    for fragment, flat in zip(layout.fragments, flats, strict=True):
        unflatten(fragment, flat, tensors)
    left = {name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])}
    assert left == set(tensors) - {slot.name for slot in slots}, "what is frozen stays as it is"


class Deep(nn.Module):
    """A stack of blocks in a part called `module`, as DDP calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 1)


def compiled(model: nn.Module) -> nn.Module:
    """Never called here: compiling takes seconds, wrapping does not."""
    return torch.compile(model)  # type: ignore[return-value]


def blocks_checkpointed(model: nn.Module) -> nn.Module:
    assert isinstance(model, Deep)
    for index, block in enumerate(model.module):
        model.module[index] = checkpoint_wrapper(block)
    return model


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


WRAPS: list[Callable[[nn.Module], nn.Module]] = [
    compiled,
    blocks_checkpointed,
    in_ddp,
    lambda model: compiled(in_ddp(blocks_checkpointed(model))),
    lambda model: in_ddp(compiled(model)),
]


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_model_has_the_layout_of_the_bare_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(Deep())
    assert list(bare_parameters(wrapped)) == [name for name, _ in Deep().named_parameters()]
    assert set(bare_parameters(wrapped)) != {name for name, _ in wrapped.named_parameters()}
    sync = SyncSettings(fragments=2)
    assert make_layout(parameter_facts(wrapped), sync).digest == make_layout(parameter_facts(Deep()), sync).digest


def test_moments_saved_by_a_wrapped_model_are_restored_into_the_bare_one() -> None:
    bare, wrapped = Deep(), compiled(blocks_checkpointed(Deep()))
    optimizers = [build_optimizer(model, InnerSettings()) for model in (wrapped, bare)]
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    saved = saved_moments(wrapped, optimizers[0])
    assert saved is not None and restore_inner_state(bare, optimizers[1], saved.encode())


def compiled_regression() -> nn.Module:
    """A user's entrypoint."""
    return compiled(Regression())


def test_an_entrypoint_that_returns_a_compiled_model_has_the_layout_of_the_bare_model() -> None:
    run = make_run(1, 4, SyncSettings(every=4, fragments=2), OuterSettings(), InnerSettings())
    model = replace(run.settings.model, entrypoint=f"{__name__}:compiled_regression")
    assert layout_of(replace(run.settings, model=model)).digest == run.layout.digest
