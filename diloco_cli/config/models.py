"""Models as plain numbers: the shapes of the built-in ones, and the facts of any model that planning needs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from diloco_cli.formulas import formula
from diloco_cli.layout import ParameterFact, fragment_sizes

BYTE_VOCABULARY = 256
TENSORS_BESIDE_LAYERS = 3  # of text models: embedding, positions, last norm
TENSORS_PER_DENSE_LAYER = 6  # attention in and out, MLP in and out, two norms


@dataclass(frozen=True)
class GPTShape:
    """A decoder-only transformer with tied embeddings, learned positions and no biases."""

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int = BYTE_VOCABULARY

    @property
    def num_parameters(self) -> int:
        """Embedding (tied), positions; the layers' matrices and two norms of each; the last norm."""
        return self.embedding_parameters + self.hidden_parameters + (2 * self.layers + 1) * self.width

    @property
    def hidden_parameters(self) -> int:
        """Per layer attention 4 d^2, MLP 8 d^2."""
        return self.layers * 12 * self.width**2

    @property
    def embedding_parameters(self) -> int:
        return (self.vocabulary + self.sequence) * self.width

    @property
    def active_parameters(self) -> int:
        """Those that one token's forward pass uses."""
        return self.num_parameters

    @property
    def num_tensors(self) -> int:
        return TENSORS_BESIDE_LAYERS + TENSORS_PER_DENSE_LAYER * self.layers


@dataclass(frozen=True)
class MoEShape(GPTShape):
    """The same with `experts` MLPs of `expert_width` in each layer, `active_experts` (top-k) of them for each token."""

    experts: int = 4
    active_experts: int = 2
    expert_width: int = 128

    @property
    def num_parameters(self) -> int:
        """As the dense one, with a router [experts, d] in each layer."""
        return super().num_parameters + self.layers * self.experts * self.width

    @property
    def hidden_parameters(self) -> int:
        """`experts` MLPs of 2 d `expert_width` in place of the dense one's."""
        return self.layers * (4 * self.width**2 + self.experts * self._expert)

    @property
    def active_parameters(self) -> int:
        return self.num_parameters - self.layers * (self.experts - self.active_experts) * self._expert

    @property
    def num_tensors(self) -> int:
        """A layer has a router and two matrices per expert where the dense one has two."""
        return super().num_tensors + self.layers * (2 * self.experts - 1)

    @property
    def _expert(self) -> int:
        return 2 * self.width * self.expert_width


@dataclass(frozen=True)
class ViTShape:
    """A vision transformer over square grey images: each patch is one token, `sequence` of them an image."""

    layers: int
    width: int
    heads: int
    image: int = 8
    patch: int = 2
    classes: int = 10

    @property
    def sequence(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def num_parameters(self) -> int:
        """Patches in (no bias), positions; the layers of a text model; the last norm; the head (no bias)."""
        beside = self.patch**2 + self.sequence + 1 + self.classes + 2 * self.layers
        return beside * self.width + self.hidden_parameters

    @property
    def hidden_parameters(self) -> int:
        """As of a text model."""
        return self.layers * 12 * self.width**2

    @property
    def embedding_parameters(self) -> int:
        """No table of tokens: nothing is merged as an embedding."""
        return 0

    @property
    def active_parameters(self) -> int:
        return self.num_parameters

    @property
    def num_tensors(self) -> int:
        return 4 + TENSORS_PER_DENSE_LAYER * self.layers


Shape = GPTShape | ViTShape

MODEL_PRESETS: dict[str, Shape] = {
    "gpt-pico": GPTShape(layers=4, width=64, heads=4, sequence=64),
    "gpt-nano": GPTShape(layers=3, width=80, heads=4, sequence=128),
    "gpt-micro": GPTShape(layers=4, width=128, heads=4, sequence=128),
    "gpt-small": GPTShape(layers=12, width=768, heads=12, sequence=1024),
    "moe-pico": MoEShape(layers=4, width=64, heads=4, sequence=64, experts=4, active_experts=2, expert_width=128),
    "moe-nano": MoEShape(layers=3, width=80, heads=4, sequence=128, experts=8, active_experts=2, expert_width=160),
    "moe-micro": MoEShape(layers=4, width=128, heads=4, sequence=128, experts=8, active_experts=2, expert_width=256),
    "vit-nano": ViTShape(layers=4, width=64, heads=4),
}
TEXT_DATA, VISION_DATA = "python-stdlib", "digits"
DATA_PRESETS: tuple[str, ...] = (TEXT_DATA, VISION_DATA)


def preset_shape(preset: str, vocabulary: int | None = None) -> Shape:
    """The shape of a preset, with a vocabulary of one's own if it reads text."""
    shape = MODEL_PRESETS[preset]
    return replace(shape, vocabulary=vocabulary) if vocabulary and isinstance(shape, GPTShape) else shape


def data_of(shape: Shape) -> str:
    """The data preset that fits a model preset."""
    return VISION_DATA if isinstance(shape, ViTShape) else TEXT_DATA


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
    `hidden_parameters`: of the matrices in its blocks.
    `divides`: it can be sharded layer by layer; else each rank must have a copy."""

    parameters: int
    layers: int
    width: int
    sequence: int
    embedding_parameters: int
    num_tensors: int
    idle_parameters: int = 0
    divides: bool = True
    hidden_parameters: int = 0

    @property
    def hidden(self) -> float:
        """The share of the parameters in hidden matrices."""
        return self.hidden_parameters / self.parameters

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
        count, unevenness, squares = fragment_shape(self, wanted)
        largest = largest_fragment(self.parameters, count, unevenness)
        return FragmentSizes(count, largest, self.parameters * squares)


@formula("model", "FLOPs per token")
def flops_per_token(active_parameters: int, layers: int, width: int, sequence: int) -> float:
    return 6.0 * active_parameters + 12.0 * layers * width * sequence


@formula("island", "FLOPs of Muon per token")
def newton_schulz_flops(hidden_parameters: float, width: int, tokens_of_a_step: float) -> float:
    """Five times three products of each matrix, d by n with d the shorter side: 4 d + 2 d^2 / n for each of its
    parameters, 14/3 d in the mean of a transformer's (n = 3 d, d, 4 d, 4 d)."""
    return 5 * 14 / 3 * width * hidden_parameters / tokens_of_a_step


@formula("model", "largest fragment", "parameters")
def largest_fragment(parameters: int, fragments: int, unevenness: float) -> float:
    return parameters / fragments * unevenness


@lru_cache(maxsize=256)
def fragment_shape(model: ModelFacts, wanted: int) -> tuple[int, float, float]:
    """(the fragments' number, their largest over their mean, the sum of the squares of their shares of the model), by
    the layout of its tensors as far as the numbers tell them."""
    sizes = fragment_sizes(tensors_of(model), wanted)
    count, whole = len(sizes), sum(sizes)
    return count, max(sizes) / whole * count, sum((size / whole) ** 2 for size in sizes)


def tensors_of(model: ModelFacts) -> list[ParameterFact]:
    """Two tensors that stand for the model's, the embedding and the rest: a layout cuts either by rows."""
    table = round(model.embedding_parameters / model.width) * model.width
    sizes = (("embedding", table, True), ("layers", model.parameters - table, False))
    return [
        ParameterFact(name, (max(1, size // model.width), min(size, model.width)), is_embedding)
        for name, size, is_embedding in sizes
        if size > 0
    ]


def facts_from_numbers(
    parameters: int, layers: int, width: int, sequence: int, vocabulary: int | None = None
) -> ModelFacts:
    """Without a vocabulary: a transformer's layers hold 12 d^2 parameters each, and the rest is assumed to be the
    embedding, which takes too much for it where layers hold more."""
    embedding = vocabulary * width if vocabulary else max(0, parameters - 12 * layers * width**2)
    num_tensors = TENSORS_BESIDE_LAYERS + TENSORS_PER_DENSE_LAYER * layers
    hidden = parameters - embedding
    return ModelFacts(parameters, layers, width, sequence, embedding, num_tensors, hidden_parameters=hidden)


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
        hidden_parameters=sum(prod(p.shape) for p in parameters if p.hidden),
    )
