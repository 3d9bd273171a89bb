"""A vector's blocks, worked on by several threads.

Torch's own threads wait for each other in every operation: on a busy machine that costs more than it gains. Here each
thread takes whole stripes of blocks, and waits for Python's lock alone. A block's values and the pieces of its sums do
not depend on the number of threads, so neither do the results.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

CHUNK = 1 << 16  # elements that are added up in one sum: a multiple of every codec's block and page
BLOCK = 2 * CHUNK  # elements that a thread works on at a time; float32, it fits twice into an L2 cache
MOST_MERGED = 16 * CHUNK  # the same of a merge, at most: threads wait for Python's lock after each operation
SHARES = 16  # so many blocks a fragment that is merged has at least, unless they were shorter than BLOCK
STRIPES_A_THREAD = 4  # a thread that is late holds up the others for a fraction of the work
FEWEST = 1 << 20  # elements; fewer are done sooner than threads are started


class _Process:
    threads = 1


def use_threads(count: int) -> None:
    """How many threads work on a vector in this process, from now on; 1 at first. More than one need a process in
    which torch has one thread: sums on several of torch's threads depend on their number."""
    _Process.threads = max(1, count)


def merged_block(size: int) -> int:
    """How many elements a merge of `size` works on at a time. Results may depend on it, so it knows no threads."""
    return min(MOST_MERGED, max(BLOCK, size // SHARES // CHUNK * CHUNK))


def over_blocks(size: int, work: Callable[[range], None], block: int = BLOCK) -> None:
    """Call work(starts of blocks) for stripes that cover `size` elements, each block once, several at the same time."""
    blocks = -(-size // block)
    threads = _Process.threads
    if threads == 1 or size <= FEWEST:
        work(range(0, size, block))
        return
    stripe = -(-blocks // (threads * STRIPES_A_THREAD)) * block
    with ThreadPoolExecutor(threads, initializer=torch.get_num_threads) as pool:  # else its BLAS takes all cores
        stripes = [range(start, min(start + stripe, size), block) for start in range(0, size, stripe)]
        for _ in pool.map(work, stripes):
            pass  # an error of one of them is raised here
