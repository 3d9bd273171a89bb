"""Users' models that misbehave, each in its own way. Importing this already prints."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

from tests.numerics.tiny import Regression

print("importing a model that talks", flush=True)


class Printing(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        print('{"n": 1, "loss": 0.0}', flush=True)  # like an answer, which it is not
        os.write(1, b"and without Python's own buffers\n")
        return super().forward(x, y)


class Hanging(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        time.sleep(60)
        return super().forward(x, y)


class Dying(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        os._exit(3)


class NotANumber(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * float("nan")


class Half(Regression):
    """Trained in bfloat16 throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16), y.to(torch.bfloat16))


class Small(Regression):
    """As if the device held two rows at once."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if len(x) > 2:
            raise MemoryError(f"{len(x)} rows at once")
        return super().forward(x, y)


def printing() -> nn.Module:
    print("building a model that talks", flush=True)
    return Printing()


hanging, dying, not_a_number, half, small = Hanging, Dying, NotANumber, Half, Small  # entrypoints
