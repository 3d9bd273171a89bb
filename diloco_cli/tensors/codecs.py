"""Codecs: encodings of a fragment's flat float32 vector.

| codec | bits per parameter | one value's error                                                                  |
|-------|--------------------|------------------------------------------------------------------------------------|
| fp32  | 32                 | none                                                                               |
| bf16  | 16                 | rounding to 8 bits of mantissa: at most 2^-8 of the value                          |
| int8  | 8 + 32/256 = 8.125 | at most half a step; a step is absmax / 127 of the block of 256                    |
| int4  | 4 + 16/64 = 4.25   | at most half a step and 2^-8 of absmax; a step is absmax / 7 of the block of 64    |

Bits count the scales. All round to the nearest (ties to even), so encoding is deterministic and odd: encode(-x) is
-encode(x). It is unbiased over values that are spread over many steps, and biased for any single value: a part below
half a step is lost in every round, unless error feedback carries it over.

Callers must pass finite values. A value that is not finite never becomes finite: at least the value itself becomes NaN
or infinite, at most its whole block does. int4 can do the same to values above 3.3e38. Blocks whose step is below
float32's normal range (absmax under 1.5e-36 for int8, 8.3e-38 for int4) become zeros.

int4 keeps two's complement nibbles in pages of 4096 elements: a byte's low nibble belongs to the page's first half, its
high nibble to the second, so that both halves are decoded as contiguous runs. A nibble is decoded as 16 times its value
(which needs no sign extension), and the scale is a 16th.

Encoding and decoding go through a block of elements at a time, as temporaries of a fragment's size would cost more than
the arithmetic; each thread takes whole stripes of blocks (`over_blocks`), as torch's own wait for each other in every
operation. Results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from diloco_cli.errors import UsageError
from diloco_cli.methods import CODECS, arithmetic_of
from diloco_cli.tensors.payload import Blank, Spec, views

CHUNK = 1 << 16  # elements that are added up in one sum: a multiple of every codec's block and page
BLOCK = 2 * CHUNK  # elements that a thread works on at a time; float32, it fits twice into an L2 cache
MOST_MERGED = 16 * CHUNK  # the same of a merge, at most: threads wait for Python's lock after each operation
SHARES = 16  # so many blocks a fragment that is merged has at least, unless they were shorter than BLOCK
STRIPES_A_THREAD = 4  # a thread that is late holds up the others for a fraction of the work
FEWEST = 1 << 20  # elements; fewer are done sooner than threads are started
INT8_BLOCK = 256
INT4_BLOCK = 64
PAGE = 4096
NORMAL = torch.finfo(torch.float32).tiny
LOW, HIGH = 0x0F, -16  # nibble masks of an int8
Tensors = dict[str, torch.Tensor]
Read = Callable[[int, torch.Tensor], torch.Tensor]


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


@dataclass(frozen=True)
class Codec:
    """Encodes n float32 values into named tensors and back. Deterministic.

    `encode_into(n, read, tensors)` asks `read` for the values block by block, so that they need not be all in memory.
    `reader(tensors)` gives read(start, room), which decodes room.numel() elements from `start` on: into `room`, unless
    they are stored as float32 already; `start` is a multiple of CHUNK, `room` holds a multiple of CHUNK elements or all
    that are left. The returned tensor is for reading only. Several threads may read at once.
    """

    spec: Callable[[int], Spec]
    encode_into: Callable[[int, Read, Tensors], object]
    reader: Callable[[Tensors], Read]

    def to_bytes(self, values: torch.Tensor) -> bytes:
        """[n] float32 on the CPU -> payload."""
        blank = Blank(self.spec(values.numel()))
        self.encode_into(values.numel(), reader_of(values), blank.tensors)
        return blank.seal()

    def from_bytes(self, data: bytes, num_elements: int) -> torch.Tensor:
        """Payload -> [n] float32, for reading only: float32 values stay where they are in `data`. Raises PayloadError
        if it is not a payload of this codec and length."""
        tensors = views(data, self.spec(num_elements))
        stored = tensors.get("values")
        if stored is not None and stored.dtype == torch.float32:
            return stored
        return read_all(num_elements, self.reader(tensors))


def reader_of(values: torch.Tensor) -> Read:
    """[n] float32 as they lie in memory."""
    return lambda start, room: values[start : start + room.numel()]


def read_all(num_elements: int, read: Read) -> torch.Tensor:
    """[n] float32, in memory of their own."""
    values = torch.empty(num_elements, dtype=torch.float32)

    def fill(starts: range) -> None:
        for start in starts:
            room = values[start : start + BLOCK]
            found = read(start, room)
            if found.data_ptr() != room.data_ptr():
                room.copy_(found)

    over_blocks(num_elements, fill)
    return values


def blocks_of(num_elements: int, read: Read, starts: range) -> Iterator[tuple[int, torch.Tensor]]:
    """(start, values) of each block, valid until the next one."""
    room = torch.empty(BLOCK)
    for start in starts:
        yield start, read(start, room[: min(BLOCK, num_elements - start)])


def _plain(dtype: torch.dtype) -> Codec:
    def encode(n: int, read: Read, tensors: Tensors) -> None:
        def copy(starts: range) -> None:
            for start, block in blocks_of(n, read, starts):
                tensors["values"][start : start + BLOCK].copy_(block)

        over_blocks(n, copy)

    def reader(tensors: Tensors) -> Read:
        values = tensors["values"]
        if dtype == torch.float32:
            return reader_of(values)
        return lambda start, room: room.copy_(values[start : start + room.numel()])

    return Codec(
        spec=lambda n: {"values": (dtype, (n,))},
        encode_into=encode,
        reader=reader,
    )


def _int8_spec(n: int) -> Spec:
    """A float32 scale per block. Scales come first: every tensor lies aligned in its payload."""
    return {"scales": (torch.float32, (-(-n // INT8_BLOCK),)), "quantised": (torch.int8, (n,))}


def _int4_spec(n: int) -> Spec:
    packed = n // PAGE * (PAGE // 2) + (n % PAGE + 1) // 2
    return {"scales": (torch.bfloat16, (-(-n // INT4_BLOCK),)), "packed": (torch.int8, (packed,))}


def _int8_encode(n: int, read: Read, tensors: Tensors) -> None:
    """Into the tensors of the spec."""

    def encode(starts: range) -> None:
        steps = _Steps(INT8_BLOCK, 127.0, torch.float32)
        for start, block in blocks_of(n, read, starts):
            quantised = steps.count(block, tensors["scales"][start // INT8_BLOCK :])
            tensors["quantised"][start : start + BLOCK].copy_(quantised)

    over_blocks(n, encode)


def _int8_reader(tensors: Tensors) -> Read:
    quantised, scales = tensors["quantised"], tensors["scales"]

    def read(start: int, out: torch.Tensor) -> torch.Tensor:
        out.copy_(quantised[start : start + out.numel()])
        return _scale(out, scales[start // INT8_BLOCK :], INT8_BLOCK)

    return read


def _int4_encode(n: int, read: Read, tensors: Tensors) -> None:
    """Into the tensors of the spec."""

    def encode(starts: range) -> None:
        steps = _Steps(INT4_BLOCK, 7.0, torch.bfloat16)
        nibbles, low = torch.empty(BLOCK, dtype=torch.int8), torch.empty(BLOCK // 2, dtype=torch.int8)
        for start, block in blocks_of(n, read, starts):
            quantised = nibbles[: block.numel()].copy_(steps.count(block, tensors["scales"][start // INT4_BLOCK :]))
            for first, second, packed in _pages(quantised, tensors["packed"][start // 2 :]):
                room = low[: first.numel()].view(first.shape)
                torch.bitwise_and(first, LOW, out=room)
                torch.bitwise_left_shift(second, 4, out=packed[..., : second.shape[-1]])
                packed[..., second.shape[-1] :] = 0
                packed.bitwise_or_(room)

    over_blocks(n, encode)


def _int4_reader(tensors: Tensors) -> Read:
    packed, scales = tensors["packed"], tensors["scales"]

    def read(start: int, out: torch.Tensor) -> torch.Tensor:
        nibbles = torch.empty(out.numel() // 2 + 1, dtype=torch.int8)
        for first, second, both in _pages(out, packed[start // 2 :]):
            room = nibbles[: both.numel()].view(both.shape)
            first.copy_(torch.bitwise_left_shift(both, 4, out=room))
            second.copy_(torch.bitwise_and(both, HIGH, out=room)[..., : second.shape[-1]])
        blocks = -(-out.numel() // INT4_BLOCK)
        sixteenths = scales[start // INT4_BLOCK :][:blocks].float().mul_(1 / 16)
        return _scale(out, sixteenths, INT4_BLOCK)

    return read


def _pages(values: torch.Tensor, packed: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(first halves, second halves, their bytes) of a chunk: all whole pages as [pages, half], then the last one."""
    n = values.numel()
    pages, rest = divmod(n, PAGE)
    parts = []
    if pages:
        halves = values[: pages * PAGE].view(pages, 2, PAGE // 2)
        parts.append((halves[:, 0], halves[:, 1], packed[: pages * PAGE // 2].view(pages, PAGE // 2)))
    if rest:
        start, half = pages * PAGE, (rest + 1) // 2
        parts.append((values[start : start + half], values[start + half : n], packed[start // 2 : start // 2 + half]))
    return parts


class _Steps:
    """Counts a chunk's values in steps of their block's absmax / `most`; owns the buffers for it."""

    def __init__(self, block: int, most: float, dtype: torch.dtype) -> None:
        self.block, self.most, self.dtype = block, most, dtype
        self._padded, self._counted = torch.empty(BLOCK), torch.empty(BLOCK)

    def count(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """[n] whole numbers as float32, valid until the next call; the blocks' steps go into `scales`."""
        n = values.numel()
        blocks = -(-n // self.block)
        rows = values
        if n % self.block:
            rows = self._padded[: blocks * self.block]
            rows[:n].copy_(values)
            rows[n:] = 0
        rows = rows.view(blocks, self.block)
        absmax = torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_())
        step = scales[:blocks].copy_(absmax.div_(self.most)).float()
        inverse = torch.where(step < NORMAL, 0.0, 1.0 / step)  # a NaN stays one
        counted = self._counted[: blocks * self.block].view(blocks, self.block)
        torch.mul(rows, inverse[:, None], out=counted).round_()
        return counted.view(-1)[:n]


def _scale(out: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply each block of `out` by its scale, in place."""
    whole = out.numel() // block
    out[: whole * block].view(whole, block).mul_(scales[:whole, None])
    if out.numel() % block:
        out[whole * block :].mul_(scales[whole])
    return out


FP32, BF16 = _plain(torch.float32), _plain(torch.bfloat16)
INT8 = Codec(_int8_spec, _int8_encode, _int8_reader)
INT4 = Codec(_int4_spec, _int4_encode, _int4_reader)


def codec(name: str) -> Codec:
    """Raises UsageError for a name that is not in methods.CODECS."""
    if name not in CODECS:
        raise UsageError(f"unknown codec {name!r}; allowed: {', '.join(CODECS)}")
    found: Codec = arithmetic_of(CODECS[name])
    return found
