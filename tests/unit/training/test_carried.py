"""What is said of a model's state."""

from __future__ import annotations

import torch
from torch import nn

from diloco_cli.training.carried import carried_text


class TiedAndNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.out = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8)
        self.out.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("mask", torch.zeros(3))


def test_what_is_carried_and_what_is_not() -> None:
    with torch.device("meta"):
        model = TiedAndNormed()
    assert carried_text(model, ()) == (
        "carried: 48 parameters in 4 tensors (1 tied); as the model's code makes them, not exchanged: 1 frozen tensors,"
        " 4 buffers"
    )
    some = carried_text(model, {"norm.running_mean", "norm.running_var"})
    assert ", 2 buffers (such as norm.running_mean); " in some and some.endswith("1 frozen tensors, 2 buffers")
