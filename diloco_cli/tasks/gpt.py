"""A small decoder-only transformer: pre-norm, learned positions, tied embeddings, no biases."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from diloco_cli.config.presets import GPTShape


class Block(nn.Module):
    """Attention and a four times wider MLP, each behind a norm and a residual."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """Tokens [batch, length] int64 and their successors, same shape -> mean loss in nats per token, a scalar."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self._initialise(shape.layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's rule: normal 0.02, projections back into the residual stream smaller by 1 / sqrt(2 layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            into_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if into_residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def build(shape: GPTShape) -> nn.Module:
    return GPT(shape)
