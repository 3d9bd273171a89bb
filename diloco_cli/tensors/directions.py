"""How the directions of a merge's deltas agree with each other, or where only two can be compared, with the fragment's
momentum: from a sample of values that no learner knows when it offers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from diloco_cli.digests import digest
from diloco_cli.tensors.codecs import Read
from diloco_cli.tensors.stripes import CHUNK

SAMPLED_CHUNKS, SAMPLED_VALUES = 16, 4096
FEWEST_VALUES = 64  # of fewer, honest deltas point against each other by chance
PARTNERS = 64  # at most, that each delta is compared with

Values = npt.NDArray[np.float64]


def agreements(size: int, reads: Sequence[Read], momentum: Read, seed: str) -> tuple[float, ...]:
    """Of each of three or more deltas of `size` values the upper median of its cosines with the others: not below that
    with some honest one, while more than half of the deltas are honest. Of two the cosine of each with the momentum, in
    which deltas of many merges have a part. Of one nothing. Exact sums, in a fixed order."""
    match len(reads):
        case 0 | 1:
            return ()
        case 2:
            cosines = _cosines(_units(size, [*reads, momentum], seed), [2])
            return tuple(_bounded(row[0]) for row in cosines[:2])
    units = _units(size, reads, seed)
    partners = range(0, len(units), -(-len(units) // PARTNERS))
    found = []
    for place, row in enumerate(_cosines(units, partners)):
        others = sorted(one for partner, one in zip(partners, row, strict=True) if partner != place)
        found.append(_bounded(others[len(others) // 2]))
    return tuple(found)


def _units(size: int, reads: Sequence[Read], seed: str) -> Values:
    """The samples, [m, k], each of length 1; of one without a length zeros."""
    values = np.stack([_sample(size, read, seed) for read in reads])
    lengths = np.sqrt((values**2).sum(axis=1, keepdims=True))
    sound = np.isfinite(lengths) & (lengths > 0)  # what is not finite is refused later, and agrees with nobody
    units: Values = np.divide(values, lengths, out=np.zeros_like(values), where=sound)
    return units


def _cosines(units: Values, partners: Sequence[int]) -> Values:
    """Of each with each of the partners, without BLAS: the same bits with any number of threads."""
    return np.asarray(np.einsum("mk,pk->mp", units, units[list(partners)]))


def _bounded(cosine: float) -> float:
    return max(-1.0, min(1.0, float(cosine)))


def _sample(size: int, read: Read, seed: str) -> Values:
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
