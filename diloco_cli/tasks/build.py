"""From settings to a model and its data: presets, or a user's `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from diloco_cli.config.models import DATA_PRESETS, MODEL_PRESETS, VISION_DATA, Shape, ViTShape, preset_shape
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import DilocoError, RefusedError, UsageError, suggestion
from diloco_cli.tasks import data, huggingface, models
from diloco_cli.tasks.data import ByteText, Digits, OwnTokens, epochs_text, refuse_short

CONTRACT = "forward(tokens, targets) must return the mean loss, or (loss, auxiliary) while training: scalar tensors"
DEFAULT_SEQUENCE = 128  # of preset data for a user's own model

Batch = tuple[torch.Tensor, torch.Tensor]


class Data(Protocol):
    """A learner's stream of batches (inputs, targets), addressed by position so that a restart continues exactly."""

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch: ...

    def held_out(self, num_sequences: int) -> Iterator[Batch]: ...


def build_model(run: RunSettings) -> nn.Module:
    """A module that keeps CONTRACT; seeded by train.seed."""
    torch.manual_seed(run.train.seed)
    settings = run.model
    if settings.entrypoint:
        model = _call(run, settings.entrypoint, settings.args, "model.entrypoint")
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise UsageError(
                f"{settings.entrypoint} must return a torch.nn.Module, not {kind}", where="model.entrypoint"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                f"{settings.entrypoint} returned a model without parameters to train", where="model.entrypoint"
            )
        return model
    if settings.huggingface:
        _refuse_unless(run.consented or bool(settings.args), settings.huggingface, "model.huggingface")
        return huggingface.build(settings)
    return models.build(shape_of(run))


def shape_of(run: RunSettings) -> Shape:
    """The shape of the run's preset. Raises UsageError if there is none that can be trained."""
    preset = run.model.preset
    if preset not in MODEL_PRESETS:
        near = suggestion(preset or "", MODEL_PRESETS)
        missing = f"no preset {preset!r}" if preset else "no preset, entrypoint or huggingface"
        raise UsageError(
            f"model: {missing} that can be trained; allowed: {', '.join(MODEL_PRESETS)}{near}",
            hint="set model.preset, or model.entrypoint: package.module:function",
        )
    return preset_shape(preset, run.model.vocabulary)


class _Undrawn(TorchFunctionMode):
    """Draws no values for what has none: torch would import its compiler for that, as long as importing torch takes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function in (torch.Tensor.normal_, nn.init.normal_):
            drawn: torch.Tensor = args[0] if args else given["tensor"]
            if drawn.is_meta:
                return drawn
        return function(*args, **given)


def build_model_on_meta(run: RunSettings) -> nn.Module:
    """Names and shapes only. A user's model that cannot be built so is built on the CPU."""
    try:
        with torch.device("meta"), _Undrawn():
            return build_model(run)
    except UsageError:
        if not run.model.entrypoint:
            raise
        return build_model(run)


def build_data(run: RunSettings, uses: Sequence[str] = ("batch", "held_out")) -> Data:
    """`uses`: the methods that will be called; a user's object must have these."""
    settings = run.data
    if settings.entrypoint:
        data = _call(run, settings.entrypoint, settings.args, "data.entrypoint")
        missing = [name for name in uses if not callable(getattr(data, name, None))]
        if missing:
            raise UsageError(
                f"{settings.entrypoint} returned a {type(data).__name__} without {' and '.join(missing)}",
                where="data.entrypoint",
                hint="it must have batch(shard, num_shards, position, batch_tokens) and held_out(num_sequences)",
            )
        return cast(Data, data)
    if settings.is_own:
        return open_own_data(run)
    if settings.preset not in DATA_PRESETS:
        near = suggestion(settings.preset or "", DATA_PRESETS)
        raise UsageError(f"data: no preset {settings.preset!r}; allowed: {', '.join(DATA_PRESETS)}{near}")
    if settings.preset == VISION_DATA:
        sequence = shape_of(run).sequence if run.model.preset else run.model.sequence
        return Digits(sequence or ViTShape(1, 1, 1).sequence, run.train.seed)
    sequence, vocabulary = _reads(run)
    if vocabulary is not None and run.model.huggingface:
        huggingface.refuse_few_symbols(run.model, vocabulary)
    return ByteText(sequence, run.train.seed)


def open_own_data(run: RunSettings) -> OwnTokens:
    """Token shards or text, as long as the model's sequences. Raises RefusedError before this machine's consent."""
    _refuse_unless(run.consented, run.data.tokens or run.data.text or "", "data")
    sequence, vocabulary = _reads(run)
    return data.open_own_data(run, sequence, vocabulary)


def _reads(run: RunSettings) -> tuple[int, int | None]:
    """How long the model's sequences are, in tokens, and its vocabulary, if that is known."""
    if run.model.huggingface:
        _refuse_unless(run.consented or bool(run.model.args), run.model.huggingface, "model.huggingface")
        return huggingface.reads(run.model)
    if run.model.preset:
        shape = shape_of(run)
        return shape.sequence, None if isinstance(shape, ViTShape) else shape.vocabulary
    return run.model.sequence or DEFAULT_SEQUENCE, None


def tried(model: nn.Module, batch: Batch, what: str) -> Any:
    """What the model's forward gives. Raises UsageError for one that cannot be called so, or that raises an error."""
    try:
        return model(*batch)
    except DilocoError:
        raise
    except Exception as error:
        # Of this call alone: what forward itself raises may be of this machine.
        if reason := _cannot_take(model, batch):
            raise UsageError(f"forward(tokens, targets): {reason}", where="model", hint=CONTRACT) from None
        raise _failed(error, f"the model's forward on {what} ({described_batch(batch)})", "model") from error


def _cannot_take(model: nn.Module, batch: Batch) -> str:
    try:
        signature(model.forward).bind(*batch)
    except TypeError as error:
        return str(error)
    except ValueError:  # a traced module tells no signature
        return ""
    return ""


def called(work: Callable[[], Any], what: str, where: str = "data") -> Any:
    """The result of a user's code; an error in it becomes a UsageError with its place."""
    try:
        return work()
    except DilocoError:
        raise
    except Exception as error:
        raise _failed(error, what, where) from error


def _failed(error: Exception, what: str, where: str) -> UsageError:
    see = "see where with DILOCO_DEBUG=1"
    hint = f"{see}; {CONTRACT}" if where == "model" else see
    return UsageError(f"{what} raised {type(error).__name__}: {error}", where=where, hint=hint)


def described_batch(batch: Batch) -> str:
    """`tokens [2, 128] int64 from 0 to 255, targets [2, 128] int64 from 0 to 255`."""
    parts = []
    for name, tensor in zip(("tokens", "targets"), batch, strict=True):
        kind = str(tensor.dtype).removeprefix("torch.")
        parts.append(f"{name} {list(tensor.shape)} {kind}{_span_of(tensor)}")
    return ", ".join(parts)


def _span_of(tensor: torch.Tensor) -> str:
    try:
        return f" from {tensor.min().item():g} to {tensor.max().item():g}"
    except (RuntimeError, TypeError, ValueError):  # an empty one, and types that have no order, or none in torch
        return ""


def losses_of(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(the reported loss, the objective: the loss plus the model's auxiliary term, if it gives one).

    An auxiliary term (the balance of experts) is trained on and not reported. Raises UsageError for anything but
    scalars of a floating type.
    """
    terms = output if isinstance(output, tuple) else (output,)
    if len(terms) not in (1, 2) or not all(_is_scalar(term) for term in terms):
        raise UsageError(f"{CONTRACT}, not {_described(output)}", where="model")
    loss: torch.Tensor = terms[0]
    return loss, loss if len(terms) == 1 else loss + terms[1]


def _is_scalar(term: Any) -> bool:
    return isinstance(term, torch.Tensor) and term.numel() == 1 and term.is_floating_point()


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor {list(output.shape)} of {str(output.dtype).removeprefix('torch.')}"
    if isinstance(output, tuple):
        return f"({', '.join(_described(term) for term in output)})"
    return type(output).__name__


def _refuse_unless(consented: bool, what: str, where: str) -> None:
    """Nothing that a bucket names is used before this machine has consented (runtime/consent.py): a command
    asks for that with a better error than this last guard's. Raises RefusedError."""
    if not consented:
        hint = f"give --allow-code {what} to diloco learner, syncer or resume"
        raise RefusedError(f"this machine has not consented to {what}", where=where, hint=hint)


def _call(run: RunSettings, entrypoint: str, arguments: dict[str, Any], where: str) -> Any:
    """The result of the user's function; an error in it is reported as the user's."""
    _refuse_unless(run.consented, entrypoint, where)
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
    module_name, _, name = entrypoint.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # importing runs the user's own code
        hint = "write it as package.module:function; looked for in PYTHONPATH, among the installed packages, and last"
        hint += " beside the run file"
        if module_name.endswith(".py"):
            hint = f"a module's name, without .py: {module_name.removesuffix('.py')}:{name}"
        raise UsageError(
            f"cannot load {entrypoint!r}: {type(error).__name__}: {error}", where=where, hint=hint
        ) from error
    return cast(Callable[..., Any], found)


def check_own_data(run: RunSettings, num_shards: int, batch_tokens: int) -> str | None:
    """How often a run goes through its own tokens; None for other data. Raises UsageError if they are too short for
    `num_shards` streams in batches of so many tokens."""
    if not run.data.is_own:
        return None
    data = open_own_data(run)
    refuse_short(run, data, num_shards, batch_tokens)
    return epochs_text(run, data)
