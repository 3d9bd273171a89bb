"""What may end a rank, and a learner of one process alike, in words that say which and what helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from diloco_cli.errors import DilocoError, TryAgainError


class OutOfMemoryError(DilocoError):
    """The device has too little memory for what this process does."""

    code = "out_of_memory"


class OtherRankLostError(TryAgainError):
    """Nothing is wrong with this rank: the one that is lost says what ended it."""

    code = "rank_lost"


@contextmanager
def enough_memory(called: str, micro_batch_tokens: int | None = None) -> Iterator[None]:
    """`micro_batch_tokens`: what this process computes at once."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = "a small train.micro_batch_tokens"
        if micro_batch_tokens is not None:
            smaller = f"train.micro_batch_tokens below {micro_batch_tokens}"
        raise OutOfMemoryError(
            f"{called} is out of memory: {str(error).partition('. ')[0]}",
            hint=f"more ranks (--ranks), or a run with {smaller} or train.checkpointing=true",
        ) from error


@contextmanager
def with_others(doing: str) -> Iterator[None]:
    """Around what all ranks do together."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            raise OtherRankLostError(f"another rank of the island was lost during {doing}") from error
        raise
