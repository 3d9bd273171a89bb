"""A model wrapped by compile, checkpointing or DDP has the layout, the moments and the export names of the bare one."""

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
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.launch.new_run import layout_of
from diloco_cli.layout import make_layout
from diloco_cli.tensors.flat import bare_parameters, parameter_facts
from diloco_cli.training.inner import build_optimizer, restore_inner_state, saved_moments
from tests.numerics.harness import make_run
from tests.numerics.tiny import Regression


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
