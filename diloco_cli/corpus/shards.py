"""Token shards as one stream of tokens, read at any position; each block is checked against the index.

Files are read at positions (pread, or a range of an object), never mapped. Blocks of a bucket are kept in a bounded
local cache.
"""

from __future__ import annotations

import fcntl
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco_cli.corpus.index import BLOCK_BYTES, Index, block_sum, changed
from diloco_cli.corpus.shuffle import WINDOW
from diloco_cli.store.open import answers
from diloco_cli.store.port import Store

LOCK = ".lock"
TEMPORARY = ".part"
Found = tuple[float, int, Path]  # when it was last used (the file's time), bytes, file


class BlockCache:
    """At most `max_bytes` in `folder`; the blocks that were used longest ago go first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def get(self, name: str) -> bytes | None:
        """The bytes stored under this name, or None."""
        path = self.folder / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:  # it was never there, or another process has just made room
            return None
        return data

    def holds(self, name: str) -> bool:
        return (self.folder / name).exists()

    def put(self, name: str, data: bytes) -> None:
        """Keep these bytes, if they fit, in the place of older ones. A full or read-only disk only means no cache."""
        if len(data) > self.max_bytes:
            return
        with suppress(OSError), self._alone():
            self._make_room(len(data))
            part = self.folder / TEMPORARY
            part.write_bytes(data)
            part.rename(self.folder / name)

    def num_bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size, _ in self._files())

    def _make_room(self, wanted: int) -> None:
        files = sorted(self._files())
        held = sum(size for _, size, _ in files)
        for _, size, path in files:
            if held + wanted <= self.max_bytes and path.name != TEMPORARY:
                continue  # a leftover of a killed process goes in any case
            path.unlink(missing_ok=True)
            held -= size

    def _files(self) -> Iterator[Found]:
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name != LOCK:
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        yield status.st_mtime, status.st_size, Path(entry.path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


HELD_BLOCKS = 3 * WINDOW  # in memory, 4 MiB each: a shuffled block lies on two or three blocks of the index
Tokens = npt.NDArray[Any]
Place = tuple[int, int]  # the number of a shard, the number of a block in it


class TokenShards:
    """The stream that an index describes. Safe between threads."""

    def __init__(self, store: Store, index: Index, cache: BlockCache | None = None) -> None:
        self.store, self.index, self.cache = store, index, cache
        self.num_tokens = index.num_tokens
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self._block_tokens = BLOCK_BYTES // index.item_bytes
        self._begins = [0, *accumulate(shard.tokens for shard in index.shards)]
        self._held: OrderedDict[Place, Tokens] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the stream, in the shards' own type. Raises DataCheckError where a shard is not what
        the index says, StoreError where it cannot be read."""
        parts = []
        while start < stop:
            number = bisect_right(self._begins, start) - 1
            block, within = divmod(start - self._begins[number], self._block_tokens)
            end = min(stop - start, self._begins[number + 1] - start, self._block_tokens - within)
            parts.append(self._block(number, block)[within : within + end])
            start += end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def blocks_at(self, starts: npt.NDArray[np.int64], length: int) -> list[Place]:
        """The blocks in which these stretches of `length` tokens begin and end, each once, in order."""
        ends = np.concatenate([starts, starts + length - 1])
        numbers = np.searchsorted(self._begins, ends, side="right") - 1
        blocks = (ends - np.asarray(self._begins)[numbers]) // self._block_tokens
        return sorted({(int(number), int(block)) for number, block in zip(numbers, blocks, strict=True)})

    def load(self, places: list[Place]) -> None:
        """Hold these blocks in memory, if they are not; many are fetched at a time. More than are ever held are left to
        `read`."""
        if len(places) <= HELD_BLOCKS:
            with self._lock:
                missing = [place for place in places if place not in self._held]
                for place in set(places) - set(missing):
                    self._held.move_to_end(place)  # or those that come would take its room
            for place, data in zip(missing, answers(lambda place: self._bytes(*place), missing), strict=True):
                self._hold(place, data)

    def keep_ahead(self, places: list[Place]) -> None:
        """Fetch these blocks into the local cache, one after the other, if they are not there. Raises StoreError."""
        if self.cache is not None:
            for number, block in places:
                if not self.cache.holds(self.index.shards[number].blocks[block]):
                    self._bytes(number, block)

    def check_block(self, number: int, block: int) -> int:
        """Read this block past all caches; how many tokens it has. Raises DataCheckError."""
        return len(self._fetched(number, block)) // self.index.item_bytes

    def _block(self, number: int, block: int) -> Tokens:
        place = (number, block)
        with self._lock:
            if place in self._held:
                self._held.move_to_end(place)
                return self._held[place]
        return self._hold(place, self._bytes(number, block))

    def _hold(self, place: Place, data: bytes) -> Tokens:
        found = np.frombuffer(data, self._dtype)
        with self._lock:
            self._held[place] = found
            while len(self._held) > HELD_BLOCKS:
                self._held.popitem(last=False)
        return found

    def _bytes(self, number: int, block: int) -> bytes:
        """Of the cache, if it holds what the index says; else of the store."""
        wanted = self.index.shards[number].blocks[block]
        cached = None if self.cache is None else self.cache.get(wanted)
        if cached is not None and block_sum(cached) == wanted:
            return cached
        data = self._fetched(number, block)
        if self.cache is not None:
            self.cache.put(wanted, data)
        return data

    def _fetched(self, number: int, block: int) -> bytes:
        shard = self.index.shards[number]
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, shard.tokens * self.index.item_bytes)
        data = self.store.get_range(shard.name, shard.offset + start, shard.offset + end)
        if data is None:
            raise changed(self.store, shard, "is missing")
        if block_sum(data) != shard.blocks[block]:
            raise changed(self.store, shard, f"block {block} (bytes {start} to {end}) is not what the index says")
        return data
