"""How the directions of a merge's deltas agree, from a sample of values that no learner knows when it offers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from diloco_cli.digests import digest
from diloco_cli.tensors.codecs import Read
from diloco_cli.tensors.stripes import CHUNK

SAMPLED_CHUNKS, SAMPLED_VALUES = 16, 4096
FEWEST, FEWEST_VALUES = 3, 64  # of fewer values, honest deltas point against each other by chance
PARTNERS = 64  # at most, that each delta is compared with


def agreements(size: int, reads: Sequence[Read], seed: str) -> tuple[float, ...]:
    """Of each of at least FEWEST deltas of `size` values the upper median of its cosines with the others: not below
    that with some honest one, while more than half of the deltas are honest. Exact sums, in a fixed order."""
    values = np.stack([_sample(size, read, seed) for read in reads])
    lengths = np.sqrt((values**2).sum(axis=1, keepdims=True))
    sound = np.isfinite(lengths) & (lengths > 0)  # what is not finite is refused later, and agrees with nobody
    units = np.divide(values, lengths, out=np.zeros_like(values), where=sound)
    partners = range(0, len(units), -(-len(units) // PARTNERS))
    cosines = np.einsum("mk,pk->mp", units, units[list(partners)])  # no BLAS: the same bits with any number of threads
    found = []
    for place, row in enumerate(cosines):
        others = sorted(float(one) for partner, one in zip(partners, row, strict=True) if partner != place)
        found.append(max(-1.0, min(1.0, others[len(others) // 2])))
    return tuple(found)


def _sample(size: int, read: Read, seed: str) -> npt.NDArray[np.float64]:
    """Every so many-th value of some chunks, one of each of SAMPLED_CHUNKS even parts of the delta."""
    chunks, room, found = -(-size // CHUNK), torch.empty(CHUNK), []
    parts = min(chunks, SAMPLED_CHUNKS)
    step = max(1, min(size, parts * CHUNK) // SAMPLED_VALUES)
    for part in range(parts):
        drawn = int(digest(f"{seed}:{part}".encode())[-12:], 16)
        first, end = part * chunks // parts, (part + 1) * chunks // parts
        start = (first + drawn % (end - first)) * CHUNK
        chunk = read(start, room[: min(CHUNK, size - start)])
        found.append(chunk[drawn // CHUNK % step :: step].double().numpy().copy())
    return np.concatenate(found)
