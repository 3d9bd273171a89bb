"""A model and a map-style dataset, as your own would be."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

VOCABULARY, SEQUENCE = 32, 32


class Predictor(nn.Module):
    """Tokens [batch, length] and their successors -> the mean loss in nats per token."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens, targets):
        states, _ = self.memory(self.embedding(tokens))
        return F.cross_entropy(self.out(states).flatten(0, 1), targets.flatten())


class Countings(Dataset):
    """Sequences that count on by a step of their own: 3 5 7 9 ..."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        """Its number, SEQUENCE tokens, and their successors."""
        generator = torch.Generator().manual_seed(index)
        start, step = (int(torch.randint(low, VOCABULARY, (), generator=generator)) for low in (0, 1))
        both = (start + step % 8 * torch.arange(SEQUENCE + 1)) % VOCABULARY
        return index, both[:-1], both[1:]


class HeldOut:
    """What the run is evaluated on: samples that no loop draws."""

    def held_out(self, num_sequences):
        beyond = [Countings()[len(Countings()) + n] for n in range(num_sequences)]
        yield tuple(torch.stack(parts) for parts in list(zip(*beyond, strict=True))[1:])


def build_model(width=32):
    return Predictor(width)


def build_data():
    return HeldOut()
