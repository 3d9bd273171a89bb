"""A model and its data, as your own would be: two functions that run.yaml names."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 32


class Recurrent(nn.Module):
    """Tokens [batch, length] and their successors -> the mean loss in nats per token."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens, targets):
        states, _ = self.memory(self.embedding(tokens))
        return F.cross_entropy(self.out(states).flatten(0, 1), targets.flatten())


class Counting:
    """Sequences that count on by a step of their own: 3 5 7 9 ... Every position of every shard can be drawn again."""

    def __init__(self, sequence):
        self.sequence = sequence

    def batch(self, shard, num_shards, position, batch_tokens):
        """The batch at `position` tokens of this learner's shard: the same whenever it is asked for."""
        return self._draw(1 + position * num_shards + shard, batch_tokens // self.sequence)

    def held_out(self, num_sequences):
        """Never trained on: training seeds are not negative."""
        yield self._draw(-1, num_sequences)

    def _draw(self, seed, count):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(VOCABULARY, (count, 1), generator=generator)
        step = torch.randint(1, 8, (count, 1), generator=generator)
        both = (start + step * torch.arange(self.sequence + 1)) % VOCABULARY
        return both[:, :-1], both[:, 1:]


def build_model(width=32):
    return Recurrent(width)


def build_data(sequence=32):
    return Counting(sequence)
