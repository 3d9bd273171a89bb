"""A small decoder-only transformer: pre-norm, learned positions, tied embeddings, no biases."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional as F

from diloco_cli.config.presets import GPTShape
from diloco_cli.errors import UsageError

INTO_RESIDUAL = ("attention_out.weight", "mlp_out.weight")  # projections that add to the residual stream


class Attention(nn.Module):
    """Multi-head self-attention behind a norm and a residual: what every block begins with."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(Attention):
    """Attention and a four times wider MLP, each behind a norm and a residual."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """Tokens [batch, length] int64 and their successors, same shape -> mean loss in nats per token, a scalar."""

    def __init__(self, shape: GPTShape, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(shape.width, bias=False)
        initialise(self, shape.layers)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)

    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, length] int64 -> [batch, length, width]. Raises UsageError for more tokens than positions."""
        if tokens.shape[1] > self.positions.num_embeddings:
            raise UsageError(
                f"sequences of {tokens.shape[1]} tokens are longer than the model's {self.positions.num_embeddings} "
                "positions",
                where="model",
                hint="shorten the sequences of the data, or choose a model with more positions",
            )
        out: Tensor = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return out

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of [batch, length, width] against [batch, length] int64."""
        logits = F.linear(self.norm(x), self.embedding.weight).float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def initialise(model: nn.Module, layers: int) -> None:
    """GPT-2's rule: normal 0.02, projections back into the residual stream smaller by 1 / sqrt(2 layers)."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if name.endswith(INTO_RESIDUAL) else 0.02)


def build(shape: GPTShape) -> nn.Module:
    return GPT(shape, (Block(shape.width, shape.heads) for _ in range(shape.layers)))
