"""A small model of bytes whose step takes a fixed time: what every contender of storm.py trains.

The data are the source of Python's standard library; a byte is guessed from the eight before it. As in paced.py a step
is mostly a wait, so that five processes fit on two cores.
"""

from __future__ import annotations

import torch
from paced import Clocked
from torch import Tensor, nn
from torch.nn import functional as F

from diloco_cli.tasks.data import ByteText

SYMBOLS, CONTEXT, EMBEDDED, BLOCKS = 256, 8, 16, 2
WIDTH = CONTEXT * EMBEDDED
SEQUENCE, BATCH_TOKENS = 64, 256
LR, BETAS, WEIGHT_DECAY, CLIP_NORM = 6e-3, (0.9, 0.95), 0.1, 1.0
H, FRAGMENTS = 40, 4  # of both kinds of DiLoCo
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5  # what `outer: auto` is for 30 to 80 rounds
HELD_OUT = 32  # sequences


class ByteModel(nn.Module):
    """Bytes [batch, length] and their successors -> the mean loss in nats per byte."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.embedding = nn.Embedding(SYMBOLS, EMBEDDED)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.out = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        before = F.pad(self.embedding(tokens), (0, 0, CONTEXT - 1, 0))
        x = before.unfold(1, CONTEXT, 1).flatten(2)
        if self.training and self.step_s:
            x = Clocked.apply(x, self.step_s)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())

    def parts(self) -> list[nn.Module]:
        """As many as there are fragments."""
        return [self.embedding, *self.blocks, self.out]


class Trainee:
    """What a process of a contender other than `diloco` trains, with the settings that contenders.py gives `diloco`."""

    def __init__(self, step_s: float) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model, self.data, self.steps = ByteModel(step_s), build_data(), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)

    def step(self, rank: int, ranks: int, trained: nn.Module | None = None) -> None:
        batch = self.data.batch(rank, ranks, self.steps * BATCH_TOKENS, BATCH_TOKENS)
        self.optimizer.zero_grad()
        (trained or self.model)(*batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.steps += 1


def build_model(step_s: float) -> ByteModel:
    return ByteModel(step_s)


def build_data() -> ByteText:
    return ByteText(SEQUENCE, 0)
