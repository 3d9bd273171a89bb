"""The built-in models (GPT, mixture of experts, vision transformer), and what is done to any model block by block.

The built-in ones are pre-norm transformers without biases. In a mixture each token visits its top-k experts; there is
no capacity, so no token is dropped. Each expert is two matrices of its own (`blocks.2.experts.5.mlp_in.weight`), so a
merge by rows never mixes two experts.

Blocks are the members of the model's outermost nn.ModuleList objects that have parts of their own: the layers of a
transformer, but not its experts or a list of plain heads. Activation checkpointing and compiling change a block's
`forward` in place; the module tree and the names of parameters stay, and a rank's sharding, which works in a module's
hooks, lies around both.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from diloco_cli.config.models import GPTShape, MoEShape, Shape, ViTShape
from diloco_cli.config.settings import TrainSettings
from diloco_cli.errors import UsageError
from diloco_cli.tensors.flat import bare_model

INTO_RESIDUAL = ("attention_out.weight", "mlp_out.weight")  # projections that add to the residual stream
BALANCE_COEFFICIENT = 0.01  # alpha of the Switch Transformer (arXiv 2101.03961)


def build(shape: Shape) -> nn.Module:
    if isinstance(shape, ViTShape):
        return ViT(shape)
    if isinstance(shape, MoEShape):
        return MoEGPT(shape, (MoEBlock(shape) for _ in range(shape.layers)))
    return GPT(shape, (Block(shape.width, shape.heads) for _ in range(shape.layers)))


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
    """Tokens [batch, length] int64 and their successors, same shape -> mean loss in nats per token, a scalar. Positions
    are learned; the output head is the embedding."""

    def __init__(self, shape: GPTShape, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(shape.width, bias=False)
        initialise(self, shape.layers)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.loss(self.trunk(tokens)[0], targets)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length] int64 -> [batch, length, vocabulary] float32."""
        return self.head(self.trunk(tokens)[0])

    def trunk(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[batch, length] int64 -> [batch, length, width] after all blocks; and what the blocks gave beside that."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x, []

    def head(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> [batch, length, vocabulary] float32."""
        return F.linear(self.norm(x), self.embedding.weight).float()

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
        logits = self.head(x)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def initialise(model: nn.Module, layers: int) -> None:
    """GPT-2's rule: normal 0.02, projections back into the residual stream smaller by 1 / sqrt(2 layers)."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if name.endswith(INTO_RESIDUAL) else 0.02)


class Expert(nn.Module):
    """[n, width] -> [n, width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mlp_in = nn.Linear(width, hidden, bias=False)
        self.mlp_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp_out(F.gelu(self.mlp_in(x), approximate="tanh"))
        return out


def route(logits: Tensor, active_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Router logits [n, experts] -> chosen experts [n, k] int64, their weights [n, k] (sum 1), all probabilities.

    The weights are the softmax over the chosen logits alone, so with k = 1 only the balance loss would train the
    router: k must be at least 2.
    """
    top, chosen = logits.topk(active_experts, dim=-1)
    return chosen, top.softmax(dim=-1), logits.softmax(dim=-1)


def balance_loss(chosen: Tensor, probabilities: Tensor) -> Tensor:
    """E * sum_i f_i P_i (Switch Transformer, arXiv 2101.03961, eq. 4-6): f_i the share of all choices that fell on
    expert i, P_i the mean probability of expert i. 1 when both are uniform, E when one expert gets all tokens (and
    k = 1). Only P carries a gradient: away from experts that are chosen more often than others."""
    num_experts = probabilities.shape[-1]
    shares = torch.bincount(chosen.reshape(-1), minlength=num_experts).to(probabilities.dtype) / chosen.numel()
    return num_experts * (shares * probabilities.mean(dim=0)).sum()


class MoEBlock(Attention):
    """Attention, then the token's experts, each behind a norm and a residual. The router works in float32."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__(shape.width, shape.heads)
        self.active_experts = shape.active_experts
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(Expert(shape.width, shape.expert_width) for _ in range(shape.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, length, width] -> the same, and the balance loss."""
        x = self.attend(x)
        tokens = self.mlp_norm(x).flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.router.weight.float())
        chosen, weights, probabilities = route(logits, self.active_experts)
        return x + self.mix(tokens, chosen, weights).view_as(x), balance_loss(chosen, probabilities)

    def mix(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens [n, width], experts [n, k], weights [n, k] -> [n, width]: the weighted sum of the chosen experts'
        outputs for each token. Copies of the tokens are sorted by expert, so that each expert is one product over
        its own tokens: 1.7 to 3.3 times faster on a CPU than every expert over every token, at the presets' sizes."""
        copies = tokens.repeat_interleave(self.active_experts, dim=0)
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=len(self.experts)).tolist()
        parts = torch.split(copies[order], counts)
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = done[order.argsort()].view(*chosen.shape, -1)
        return (back * weights.unsqueeze(-1).to(back.dtype)).sum(dim=1)


class MoEGPT(GPT):
    """As GPT; while training, forward gives (loss, balance term): the term is trained on and never reported."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x, balances = self.trunk(tokens)
        loss = self.loss(x, targets)
        return (loss, BALANCE_COEFFICIENT * torch.stack(balances).mean()) if self.training else loss

    def trunk(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, balances = self.embed(tokens), []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return x, balances


class ViT(nn.Module):
    """Images [batch, side, side] float32 and classes [batch] int64 -> mean cross-entropy in nats per image: patches in,
    mean over patches, a linear head (arXiv 2010.11929)."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.patch = shape.patch
        self.patch_in = nn.Linear(shape.patch**2, shape.width, bias=False)
        self.positions = nn.Parameter(torch.empty(shape.sequence, shape.width))
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads, causal=False) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.classes, bias=False)
        initialise(self, shape.layers)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(images).float(), classes)

    def logits(self, images: Tensor) -> Tensor:
        """[batch, side, side] -> [batch, classes]."""
        rows = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        x = self.patch_in(rows.flatten(3).flatten(1, 2)) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(dim=1))
        return out


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """In the model's order; those of lists come before those further down."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    others = [child for child in model.children() if not isinstance(child, nn.ModuleList)]
    found = [block for blocks in lists for block in blocks if next(block.children(), None) is not None]
    return [*found, *(block for child in others for block in blocks_of(child))]


def divides(model: nn.Module) -> bool:
    """Whether it can be sharded block by block: it has blocks, and each parameter is used in one, or outside of all."""
    blocks = blocks_of(model)
    inside = [id(p) for block in blocks for p in block.parameters()]
    within = {id(module) for block in blocks for module in block.modules()}
    outside = {id(p) for m in model.modules() if id(m) not in within for p in m.parameters(recurse=False)}
    return bool(blocks) and len(set(inside)) == len(inside) and outside.isdisjoint(inside)


def check_sharded(model: nn.Module) -> None:
    """Raises UsageError for a model that every rank would hold as a whole."""
    if not divides(model):
        raise UsageError(
            f"{type(model).__name__} cannot be sharded block by block: it has no nn.ModuleList of modules with parts of"
            " their own, or two of them share a parameter",
            where="train.sharding",
            hint="keep the model's layers in an nn.ModuleList, or --set train.sharding=ddp",
        )


def check_blocks(model: nn.Module, train: TrainSettings) -> None:
    """Raises UsageError if there is nothing to checkpoint."""
    if train.checkpointing and not blocks_of(model):
        raise UsageError(
            f"{type(model).__name__} has no blocks whose activations could be computed again: no nn.ModuleList of "
            "modules with parts of their own",
            where="train.checkpointing",
            hint="keep the model's layers in an nn.ModuleList, or --set train.checkpointing=false",
        )


def prepare(model: nn.Module, train: TrainSettings) -> None:
    """As the settings say: the forward pass of each block is compiled (of the whole model, if it has none), at the
    first step, and its activations are computed again in the backward pass, with the same random draws."""
    check_blocks(model, train)
    blocks = blocks_of(model)
    if train.compile:
        for part in blocks or [bare_model(model)]:
            part.forward = torch.compile(part.forward)
    if train.checkpointing:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
