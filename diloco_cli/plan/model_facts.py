"""The facts of a model that planning needs: six numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from diloco_cli.config.huggingface import HuggingFaceFacts, sequence_of
from diloco_cli.config.presets import TENSORS_BESIDE_LAYERS, TENSORS_PER_DENSE_LAYER, preset_shape
from diloco_cli.config.settings import ModelSettings
from diloco_cli.errors import UsageError
from diloco_cli.formulas import formula
from diloco_cli.layout import ParameterFact, fragment_sizes

MAX_HIDDEN_WIDTHS = 16.0  # wider MLPs are counted so: the facts of a model of one's own are partly guessed
LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")  # of `blocks.11.attention.weight`


@dataclass(frozen=True)
class FragmentSizes:
    """How many there are, the parameters of the largest, and of the one in which a parameter chosen at random lies."""

    count: int
    largest: float
    mean: float


@dataclass(frozen=True)
class ModelFacts:
    """`embedding_parameters` travel in fragments of their own; `sequence` is in tokens. `idle_parameters` are those
    of the experts that a token does not visit (mixture of experts): they are kept and sent, but not computed with.
    `divides`: it can be sharded layer by layer; else each rank must have a copy."""

    parameters: int
    layers: int
    width: int
    sequence: int
    embedding_parameters: int
    num_tensors: int
    idle_parameters: int = 0
    divides: bool = True

    @property
    def flops_per_token(self) -> float:
        """6 N + 12 L d S: forward and backward, weights and attention (PaLM, arXiv 2204.02311, B); N counts the
        parameters that a token meets."""
        active = self.parameters - self.idle_parameters
        return flops_per_token(active, self.layers, self.width, self.sequence)

    @property
    def vocabulary(self) -> float:
        """Rows of the embedding, estimated from the numbers; learned positions are counted with them."""
        return self.embedding_parameters / self.width

    @property
    def hidden_widths(self) -> float:
        """Values in a layer's MLP that a token meets, over the width: of what attention's 4 d^2 leave of a layer's
        parameters, two matrices. 4 in a plain transformer."""
        met = (self.parameters - self.embedding_parameters - self.idle_parameters) / self.layers
        return min(max(1.0, (met / self.width**2 - 4) / 2), MAX_HIDDEN_WIDTHS)

    def fragments(self, wanted: int) -> FragmentSizes:
        """Those of a layout with at most `wanted`."""
        shares = fragment_shares(self, wanted)
        count = len(shares)
        largest = largest_fragment(self.parameters, count, max(shares) * count)
        return FragmentSizes(count, largest, self.parameters * sum(share**2 for share in shares))


@formula("model", "FLOPs per token")
def flops_per_token(active_parameters: int, layers: int, width: int, sequence: int) -> float:
    return 6.0 * active_parameters + 12.0 * layers * width * sequence


@formula("model", "largest fragment", "parameters")
def largest_fragment(parameters: int, fragments: int, unevenness: float) -> float:
    return parameters / fragments * unevenness


@lru_cache(maxsize=256)
def fragment_shares(model: ModelFacts, wanted: int) -> tuple[float, ...]:
    """Each fragment's share of the model, by the layout of its tensors as far as the numbers tell them."""
    sizes = fragment_sizes(tensors_of(model), wanted)
    return tuple(size / sum(sizes) for size in sizes)


def tensors_of(model: ModelFacts) -> list[ParameterFact]:
    """Two tensors that stand for the model's, the embedding and the rest: a layout cuts either by rows."""
    table = round(model.embedding_parameters / model.width) * model.width
    sizes = (("embedding", table, True), ("layers", model.parameters - table, False))
    return [
        ParameterFact(name, (max(1, size // model.width), min(size, model.width)), is_embedding)
        for name, size, is_embedding in sizes
        if size > 0
    ]


def model_facts(model: ModelSettings) -> ModelFacts:
    """The facts of a preset or of plain numbers; an entrypoint has to be built, which is not done here."""
    if model.preset is not None:
        shape = preset_shape(model.preset, model.vocabulary)
        return ModelFacts(
            parameters=shape.num_parameters,
            layers=shape.layers,
            width=shape.width,
            sequence=shape.sequence,
            embedding_parameters=shape.embedding_parameters,
            num_tensors=shape.num_tensors,
            idle_parameters=shape.num_parameters - shape.active_parameters,
        )
    if model.parameters and model.layers and model.width and model.sequence:
        return facts_from_numbers(model.parameters, model.layers, model.width, model.sequence)
    numbers = "{parameters: 1.0B, layers: 16, width: 2048, sequence: 2048}"
    raise UsageError(
        "model: plan knows presets and plain numbers; the size of an entrypoint's model is unknown",
        hint=f"diloco plan INVENTORY -f RUN --set model='{numbers}'",
    )


def facts_from_numbers(parameters: int, layers: int, width: int, sequence: int) -> ModelFacts:
    """A transformer's layers hold 12 d^2 parameters each; the rest is assumed to be the embedding."""
    embedding = max(0, parameters - 12 * layers * width**2)
    num_tensors = TENSORS_BESIDE_LAYERS + TENSORS_PER_DENSE_LAYER * layers
    return ModelFacts(parameters, layers, width, sequence, embedding, num_tensors)


def facts_from_parameters(parameters: Sequence[ParameterFact], sequence: int, divides: bool = True) -> ModelFacts:
    """The facts of a model that was built. Its size is exact; layers are guessed from the numbers in its tensors'
    names, the width from the side that most of its matrices have."""
    sides = Counter(side for p in parameters if len(p.shape) > 1 and not p.embedding for side in p.shape)
    numbers = [int(match[1]) for p in parameters if (match := LAYER_NUMBER.search(p.name))]
    return ModelFacts(
        parameters=sum(prod(p.shape) for p in parameters),
        layers=1 + max(numbers, default=0),
        width=max(sides, key=lambda side: (sides[side], side), default=1),
        sequence=sequence,
        embedding_parameters=sum(prod(p.shape) for p in parameters if p.embedding),
        num_tensors=len(parameters),
        divides=divides,
    )


def facts_of_huggingface(facts: HuggingFaceFacts, wanted_sequence: int | None) -> ModelFacts:
    """The facts of a config.json, for sequences of `wanted_sequence` tokens (None: config/huggingface.py's rule)."""
    return ModelFacts(
        parameters=facts.parameters,
        layers=facts.layers,
        width=facts.width,
        sequence=sequence_of(facts.sequence, wanted_sequence, "model.sequence"),
        embedding_parameters=facts.embedding_parameters,
        num_tensors=facts.num_tensors,
        idle_parameters=facts.idle_parameters,
    )
