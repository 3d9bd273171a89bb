"""The run's model with its newest committed parameters: logits, and tokens drawn from them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from diloco_cli.config.models import ViTShape
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import DataCheckError, UsageError
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import committed, load_versions
from diloco_cli.tasks import huggingface
from diloco_cli.tasks.build import DEFAULT_SEQUENCE, build_model, shape_of
from diloco_cli.tasks.weights import check_frozen
from diloco_cli.tensors.flat import bare_model, bare_tensors

LOGITS = "logits(tokens): [batch, length] int64 -> [batch, length, vocabulary]"


def load_model(run: RunFormat, state: RunState, store: Store, device: torch.device) -> nn.Module:
    """Built by the run's code, with the newest versions, ready to be evaluated."""
    model = build_model(run.settings).eval()
    check_frozen(run.settings, model)
    load_versions(run, committed(run, state), store, bare_tensors(model))
    return model.to(device)


def context_of(run: RunSettings) -> int:
    """The longest sequence of tokens that the model takes."""
    if run.model.huggingface:
        return huggingface.longest_context(run.model)
    if run.model.preset and not run.model.entrypoint:
        return shape_of(run).sequence
    return run.model.sequence or DEFAULT_SEQUENCE


class Causal:
    """The logits of a model of text; `context`: how many tokens it sees at most. Raises UsageError for a model that
    gives none."""

    def __init__(self, run: RunSettings, model: nn.Module) -> None:
        self.context = context_of(run)
        self._logits = _logits_of(run, model)
        self._device = next(model.parameters()).device

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return int(self.logits([0]).shape[-1])

    @torch.inference_mode()
    def logits(self, sequence: Sequence[int]) -> Tensor:
        """A sequence that is not empty -> [length, vocabulary] float32 on the CPU."""
        tokens = torch.tensor([sequence])
        found = self._logits(tokens.to(self._device))
        if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[:2] != tokens.shape:
            what = f"{list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(f"the model's logits must be {LOGITS}, not {what}", where="model")
        return found[0].float().cpu()

    def check(self, tokens: Sequence[int]) -> None:
        """Raises UsageError for tokens that the model does not have."""
        if tokens and max(tokens) >= self.vocabulary:
            raise UsageError(
                f"the tokenizer gives token {max(tokens)}, and the model has {self.vocabulary} tokens",
                where="--tokenizer",
                hint="name the tokenizer that the run's data was made with",
            )


def _logits_of(run: RunSettings, model: nn.Module) -> Callable[[Tensor], object]:
    if run.model.preset and not run.model.entrypoint and isinstance(shape_of(run), ViTShape):
        raise UsageError(f"the preset {run.model.preset} reads images and writes no text", where="model")
    found: Callable[[Tensor], object] | None = getattr(bare_model(model), "logits", None)
    if not callable(found):
        raise UsageError(
            f"{type(bare_model(model)).__name__} gives a loss alone, and text needs the logits of the next token",
            where="model",
            hint=f"give the model a method {LOGITS}",
        )
    return found


def finite(logits: Tensor) -> Tensor:
    """The same. Raises DataCheckError unless all are finite."""
    if not bool(logits.isfinite().all()):
        raise DataCheckError("the model's logits are not finite", hint="diloco rollback RUN --to COMMIT")
    return logits


@dataclass(frozen=True)
class Draw:
    """How a token is chosen. `temperature` 0: the most likely one; `top_k` 0: among all."""

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 0


def sample(model: Causal, prompt: list[int], count: int, draw: Draw, allowed: int | None = None) -> Iterator[int]:
    """`count` tokens after a prompt of at least one, each below `allowed`; the same for the same seed, on any device up
    to rounding. The model sees the newest `context` tokens."""
    generator = torch.Generator().manual_seed(draw.seed)
    tokens = list(prompt)
    for _ in range(count):
        last = model.logits(tokens[-model.context :])[-1, :allowed]
        tokens.append(choose(finite(last), draw, generator))
        yield tokens[-1]


def choose(logits: Tensor, draw: Draw, generator: torch.Generator) -> int:
    """Logits [vocabulary] -> a token."""
    if draw.temperature == 0:
        return int(logits.argmax())
    if 0 < draw.top_k < logits.numel():
        least = logits.topk(draw.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    chances = ((logits - logits.max()).double() / draw.temperature).softmax(dim=-1)  # also at the least temperature
    return int(torch.multinomial(chances, 1, generator=generator))
