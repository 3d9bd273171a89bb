"""Shapes of the built-in models, as plain numbers: `plan` counts parameters without building a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        """Embedding (tied), positions; per layer attention 4 d^2, MLP 8 d^2, two norms; the last norm."""
        per_layer = 12 * self.width**2 + 2 * self.width
        return self.embedding_parameters + self.layers * per_layer + self.width

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
        """As the dense one, with a router [experts, d] and `experts` MLPs of 2 d `expert_width` in place of its MLP."""
        return super().num_parameters + self.layers * (self.experts * (self.width + self._expert) - 8 * self.width**2)

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
        per_layer = 12 * self.width**2 + 2 * self.width
        beside = self.patch**2 + self.sequence + 1 + self.classes
        return beside * self.width + self.layers * per_layer

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
