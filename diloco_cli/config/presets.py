"""Shapes of the built-in models, as plain numbers: `plan` counts parameters without building a model."""

from __future__ import annotations

from dataclasses import dataclass

BYTE_VOCABULARY = 256


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
        return (self.vocabulary + self.sequence) * self.width + self.layers * per_layer + self.width


GPT_PRESETS: dict[str, GPTShape] = {
    "gpt-nano": GPTShape(layers=3, width=80, heads=4, sequence=128),
    "gpt-micro": GPTShape(layers=4, width=128, heads=4, sequence=128),
    "gpt-small": GPTShape(layers=12, width=768, heads=12, sequence=1024),
}
DATA_PRESETS: tuple[str, ...] = ("python-stdlib",)
