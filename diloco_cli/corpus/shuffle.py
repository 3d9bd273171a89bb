"""In which order sequences are trained on (`BlockShuffle`): arithmetic alone, at any position and in constant memory.

The sequences lie in blocks of at least 4 MB, as they follow one another in the shards. Each
epoch permutes the blocks; WINDOW blocks make a window, whose sequences are shuffled. So a reader uses few blocks at a
time, and no permutation of everything is held: `permuted` is a Feistel network, which maps a place to a number without
a table. Each epoch begins its blocks at another sequence, so that the last, shorter block is a different stretch every
time. Of num_shards streams, stream s takes the s-th part of an epoch's order: every sequence is drawn exactly once an
epoch, by one learner.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

WINDOW = 8  # blocks
ROUNDS = 6
Numbers = npt.NDArray[np.int64]
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64's


class BlockShuffle:
    """Of `size` sequences, in blocks of `block` sequences; `window`: how many are shuffled among themselves."""

    def __init__(self, size: int, block: int, seed: int) -> None:
        self.size, self.block, self.seed = size, block, seed
        self.window = WINDOW * block

    def shard(self, shard: int, num_shards: int, first: int, count: int) -> Numbers:
        """[count] int64: the sequences number `first` to `first + count` of a shard's endless stream. Raises ValueError
        if there are fewer sequences than shards."""
        begin, end = shard * self.size // num_shards, (shard + 1) * self.size // num_shards
        if begin == end:
            raise ValueError(f"{self.size} sequences are fewer than {num_shards} shards")
        found = []
        while count > 0:
            epoch, done = divmod(first, end - begin)
            taken = min(count, end - begin - done)
            found.append(self._of_epoch(epoch, begin + done, taken))
            first, count = first + taken, count - taken
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _of_epoch(self, epoch: int, first: int, count: int) -> Numbers:
        """The sequences at these places of an epoch's order."""
        found = []
        while count > 0:
            window, done = divmod(first, self.window)
            taken = min(count, self.window - done)
            found.append(self._of_window(epoch, window, np.arange(done, done + taken, dtype=np.int64)))
            first, count = first + taken, count - taken
        return np.concatenate(found)

    def _of_window(self, epoch: int, window: int, places: Numbers) -> Numbers:
        begin = window * self.window
        inner = permuted(places, min(self.window, self.size - begin), self._key("sequences", epoch, window))
        slots, within = np.divmod(begin + inner, self.block)
        whole = self.size // self.block  # a shorter block comes last in the order
        blocks, moved = slots.copy(), slots < whole
        blocks[moved] = permuted(slots[moved], whole, self._key("blocks", epoch))
        turned = self._key("begin", epoch) % self.size
        return np.asarray((blocks * self.block + within + turned) % self.size, np.int64)

    def _key(self, *of: object) -> int:
        """64 bits."""
        text = "/".join(map(str, (self.seed, *of)))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def permuted(places: Numbers, size: int, key: int) -> Numbers:
    """[n] int64 below `size` -> the same shape: a permutation of 0 to size - 1, chosen by `key`.

    A Feistel network permutes the numbers of an even count of bits; what falls outside is sent through it again
    (cycle walking) until it is below `size`. Authenticator 64-bit integers alone: the same on every machine.
    """
    if size <= 1:
        return places
    half = max(1, -(-(size - 1).bit_length() // 2))
    numbers = places.astype(np.uint64)
    outside = np.ones(len(numbers), bool)
    while outside.any():
        numbers[outside] = _network(numbers[outside], half, key)
        outside = numbers >= size
    return numbers.astype(np.int64)


def _network(numbers: npt.NDArray[np.uint64], half: int, key: int) -> npt.NDArray[np.uint64]:
    """A permutation of the numbers of 2 x `half` bits."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> bits, numbers & mask
    for number in range(ROUNDS):
        salt = np.uint64((key + 0x9E3779B97F4A7C15 * (number + 1)) % (1 << 64))
        left, right = right, left ^ (_mixed(right + salt) & mask)
    return (left << bits) | right


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))
