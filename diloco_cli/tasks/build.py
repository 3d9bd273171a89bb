"""From settings to a model and its data: presets, or a user's `module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from diloco_cli.config.presets import DATA_PRESETS, GPT_PRESETS
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.tasks.gpt import build as build_gpt
from diloco_cli.tasks.text import ByteText

Batch = tuple[torch.Tensor, torch.Tensor]


class Data(Protocol):
    """A learner's stream of batches, addressed by position so that a restart continues exactly."""

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch: ...

    def held_out(self, num_sequences: int) -> Iterator[Batch]: ...


def build_model(run: RunSettings) -> nn.Module:
    """A module whose forward(tokens, targets) gives the mean loss in nats per token; seeded by train.seed."""
    torch.manual_seed(run.train.seed)
    settings = run.model
    if settings.entrypoint:
        model = _call(settings.entrypoint, settings.args, "model.entrypoint")
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise UsageError(
                f"{settings.entrypoint} must return a torch.nn.Module, not {kind}", where="model.entrypoint"
            )
        return model
    if settings.preset not in GPT_PRESETS:
        raise UsageError(
            f"model: no preset {settings.preset!r} that can be trained; allowed: {', '.join(GPT_PRESETS)}",
            hint="set model.preset, or model.entrypoint: package.module:function",
        )
    return build_gpt(GPT_PRESETS[settings.preset])


def build_model_on_meta(run: RunSettings) -> nn.Module:
    """Names and shapes only. A user's model that cannot be built so is built on the CPU."""
    try:
        with torch.device("meta"):
            return build_model(run)
    except DilocoError:
        if not run.model.entrypoint:
            raise
        return build_model(run)


def build_data(run: RunSettings) -> Data:
    settings = run.data
    if settings.entrypoint:
        return cast(Data, _call(settings.entrypoint, settings.args, "data.entrypoint"))
    if settings.preset not in DATA_PRESETS:
        raise UsageError(f"data: no preset {settings.preset!r}; allowed: {', '.join(DATA_PRESETS)}")
    sequence = GPT_PRESETS[run.model.preset].sequence if run.model.preset in GPT_PRESETS else run.model.sequence
    return ByteText(sequence or 128, run.train.seed)


def search_first(folder: Path) -> None:
    """From now on modules are looked for in this folder before any other."""
    place = str(folder.absolute())
    if place not in sys.path:
        sys.path.insert(0, place)


def _call(entrypoint: str, arguments: dict[str, Any], where: str) -> Any:
    """What the user's function returns; what it raises is an error of its own, not ours."""
    function = _function(entrypoint, where)
    try:
        return function(**arguments)
    except Exception as error:
        raise UsageError(
            f"{entrypoint} raised {type(error).__name__}: {error}",
            where=where,
            hint="see where with DILOCO_DEBUG=1; its arguments are `args` beside the entrypoint",
        ) from error


def _function(entrypoint: str, where: str) -> Callable[..., Any]:
    search_first(Path.cwd())
    module_name, _, name = entrypoint.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # importing runs the user's own code
        raise UsageError(
            f"cannot load {entrypoint!r}: {type(error).__name__}: {error}",
            where=where,
            hint="write it as package.module:function; looked for beside the run file, here, and in PYTHONPATH",
        ) from error
    return cast(Callable[..., Any], found)
