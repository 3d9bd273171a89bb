"""What tokens a file of another tool holds, and where: never taken for what it is not.

Read are bare little-endian tokens (nanoGPT, datatrove, Megatron's `.bin`), arrays of numpy, and the shards of llm.c and
modded-nanogpt (a header of 256 int32: a date, a version, how many tokens). Others are refused by name. A bare file says
nothing of itself, so its bytes are looked at: tokens read as another type than they were written in train without an
error.
"""

from __future__ import annotations

import struct
from codecs import getincrementaldecoder
from dataclasses import dataclass
from io import BytesIO
from math import prod

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from diloco_cli.corpus.index import ITEM_BYTES
from diloco_cli.errors import DataCheckError, UsageError
from diloco_cli.store.port import Store

BARE, NUMPY = ".bin", ".npy"
MAX_HEADER_BYTES = 64 << 10
HEADER_BYTES = 1024
DATES = range(2020_01_01, 2100_01_01)  # the first number of a header: 20240520 of GPT-2's tokens, 20240801 of Llama 3's
USED_BYTES = 64  # of a header; zeros follow
STARTS = {
    b"PK\3\4": "a zip archive, as torch.save and numpy.savez write",
    b"\x93NUMPY": "an array of numpy: name it .npy",
    b"\x1f\x8b\x08": "compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"PAR1": "parquet: diloco data tokenize --dataset FOLDER -o OUT",
    b"ARROW1": "of Arrow: diloco data tokenize --dataset FOLDER -o OUT",
    b"\x89HDF": "of HDF5",
    b"MMIDIDX": "the index of a Megatron data set, whose .bin holds the tokens",
}
MIN_LOOKED_AT = 64  # numbers; fewer are too few to tell
TINY = 8  # the upper half of a token of 32 bits: up to 524,288 of them
MAX_TOKEN = 1 << 24  # no vocabulary is so large


@dataclass(frozen=True)
class TokenFile:
    """Tokens of `dtype` from byte `offset` on."""

    name: str
    offset: int
    tokens: int
    dtype: str


def token_file(store: Store, name: str, dtype: str) -> TokenFile:
    """What lies under this name. `dtype`: of a file that does not say it. Raises UsageError for what holds no tokens
    that can be read as they are, DataCheckError for a file that is shorter or longer than it says."""
    stat, where = store.stat(name), f"{store.url}/{name}"
    if stat is None:
        raise DataCheckError("went while it was read", where=where)
    size = stat.size_bytes
    if not size:
        raise UsageError("is empty", where=where, hint="remove it")
    head = store.get_range(name, 0, min(size, MAX_HEADER_BYTES)) or b""
    if name.endswith(NUMPY):
        found = _numpy_file(name, head, where)
    elif is_header(head):
        found = _headed_file(name, head, size, where)
    else:
        refuse_no_tokens(head, dtype, where)
        if size % ITEM_BYTES[dtype]:
            raise UsageError(f"its {size} bytes are no whole number of {dtype}", where=where)
        return TokenFile(name, 0, size // ITEM_BYTES[dtype], dtype)
    _refuse_size(found, size, where)
    return found


def is_header(head: bytes) -> bool:
    """Whether these are the first bytes of a shard of llm.c: bare tokens are not 960 zeros."""
    is_long = len(head) >= HEADER_BYTES
    return is_long and int.from_bytes(head[:4], "little") in DATES and not any(head[USED_BYTES:HEADER_BYTES])


def refuse_no_tokens(data: bytes, dtype: str, where: str) -> None:
    """Raises UsageError for the first bytes of what is no bare file of `dtype`: a file of another kind, a header, or
    tokens of a wider type."""
    kind = next((kind for start, kind in STARTS.items() if data.startswith(start)), None)
    if is_header(data):
        kind = "a shard with a header, and is read as if it had none: diloco data index, which knows it"
    if kind is None and _is_text(data):
        kind = "text: diloco data tokenize INPUT -o OUT"
    if kind is not None:
        raise UsageError(f"holds no bare tokens; it is {kind}", where=where)
    wider, place = _wider_type(data, dtype), where.rpartition("/")[0]
    if wider is not None:
        raise UsageError(
            f"holds no {dtype}: these tokens were written as {wider}, for the upper half of each is all but zero",
            where=where,
            hint=f"diloco data index {place} --dtype uint32" if wider == "uint32" else _converted(wider),
        )


def refuse_no_token(largest: int, vocabulary: int, where: str) -> None:
    """Raises UsageError for a number that is no token."""
    if largest >= min(vocabulary, MAX_TOKEN):
        known = "of no vocabulary" if vocabulary >= MAX_TOKEN else f"beyond the vocabulary of {vocabulary}"
        raise UsageError(
            f"there is a token {largest}, which is {known}: it was written as another type, or is no token",
            where=where,
            hint="--dtype uint16, if it was written so; what else there is must be converted to uint16 or uint32 first",
        )


def one_for_half(tokens: npt.NDArray[np.generic]) -> str | None:
    """A warning where one value is half of all."""
    if tokens.size < MIN_LOOKED_AT:
        return None
    values, counts = np.unique(tokens, return_counts=True)
    most = counts.argmax()
    share = counts[most] / tokens.size
    return f"token {values[most]} is {share:.0%} of it: padding, or not what it seems" if share >= 1 / 2 else None


def _is_text(data: bytes) -> bool:
    if len(data) < MIN_LOOKED_AT or any(byte < 9 or 13 < byte < 32 for byte in set(data)):
        return False
    try:
        getincrementaldecoder("utf-8")().decode(data)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return True


def _wider_type(data: bytes, dtype: str) -> str | None:
    """The type that the tokens were written in, if it is wider: the upper halves are then all but zero."""
    for wider, item in (("int64", 8), ("uint32", 4)):
        halves = np.frombuffer(data[: len(data) // item * item], f"<u{item // 2}")
        low, high = halves[::2], halves[1::2]
        if item > ITEM_BYTES[dtype] and halves.size >= MIN_LOOKED_AT and high.max() < TINY <= low.max():
            return wider
    return None


def _converted(dtype: str) -> str:
    return (
        "write it anew, for each file numpy.save('OUT/NAME.npy', numpy.fromfile('NAME.bin',"
        f" '{dtype}').astype('uint32')), then: diloco data index OUT"
    )


def _headed_file(name: str, head: bytes, size: int, where: str) -> TokenFile:
    magic, _, tokens = struct.unpack("<3i", head[:12])
    for dtype, item in ITEM_BYTES.items():
        if size == HEADER_BYTES + tokens * item:
            return TokenFile(name, HEADER_BYTES, tokens, dtype)
    raise DataCheckError(
        f"its header ({magic}) says {tokens} tokens, which are {HEADER_BYTES + 2 * tokens} bytes as uint16 or"
        f" {HEADER_BYTES + 4 * tokens} as uint32; it has {size}: cut off, or no shard of tokens",
        where=where,
        hint="fetch it again, or move it elsewhere",
    )


def _numpy_file(name: str, head: bytes, where: str) -> TokenFile:
    stream = BytesIO(head)
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, by_columns, dtype = read(stream)
    except ValueError as error:
        hint = "what holds bare tokens, as OLMo's, is named .bin; say --dtype uint32 if they are"
        raise UsageError(f"no array of numpy: {error}", where=where, hint=hint) from error
    if dtype not in (np.dtype("<u2"), np.dtype("<u4")) or (by_columns and len(shape) > 1):
        raise UsageError(
            f"holds {dtype}{' by columns' if by_columns else ''}; allowed: uint16, uint32, by rows",
            where=where,
            hint="numpy.save(FILE, tokens.astype('uint16'))",
        )
    found = "uint16" if dtype.itemsize == ITEM_BYTES["uint16"] else "uint32"
    return TokenFile(name, stream.tell(), prod(shape), found)


def _refuse_size(found: TokenFile, size: int, where: str) -> None:
    wanted = found.offset + found.tokens * ITEM_BYTES[found.dtype]
    if size != wanted:
        raise DataCheckError(f"has {size} bytes, its header says {wanted}", where=where)
    if not found.tokens:
        raise UsageError("is empty", where=where, hint="remove it")
