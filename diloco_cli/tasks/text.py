"""The embedded corpus: the Python standard library's own source, byte by byte. It is on every machine.

Held-out files are chosen by a hash of their name, so that training and evaluation never see the same file.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from diloco_cli.errors import NotFoundError
from diloco_cli.tasks.order import ShuffledEpochs

HELD_OUT_ONE_IN = 20
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "ensurepip"})
Batch = tuple[torch.Tensor, torch.Tensor]


def standard_library_files() -> list[Path]:
    """Every source file but tests, in the same order on every machine of the same Python version."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path for path in root.rglob("*.py") if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    )


def is_held_out(path: Path) -> bool:
    return zlib.crc32(path.name.encode()) % HELD_OUT_ONE_IN == 0


class ByteText:
    """Sequences of bytes from the corpus, in a seeded order that every learner can compute.

    A learner's stream is its shard: sequence i of shard s is number i * shards + s of the shuffled corpus; when the
    corpus is used up, it is shuffled anew.
    """

    def __init__(self, sequence: int, seed: int) -> None:
        self.sequence = sequence
        files = standard_library_files()
        self._train = _joined(path for path in files if not is_held_out(path))
        self._held_out = _joined(path for path in files if is_held_out(path))
        self._order = ShuffledEpochs(self.num_sequences, seed)

    @property
    def num_sequences(self) -> int:
        return (len(self._train) - 1) // self.sequence

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        """(tokens, targets), each [batch_tokens / sequence, sequence] int64, from `position` tokens of the shard on."""
        chosen = self._order.shard(shard, num_shards, position // self.sequence, batch_tokens // self.sequence)
        return self._cut(self._train, chosen)

    def held_out(self, num_sequences: int, batch_size: int = 32) -> Iterator[Batch]:
        """The same sequences every time, spread evenly over the held-out files."""
        available = (len(self._held_out) - 1) // self.sequence
        count = min(num_sequences, available)
        windows = [i * available // count for i in range(count)]
        for start in range(0, count, batch_size):
            yield self._cut(self._held_out, windows[start : start + batch_size])

    def _cut(self, corpus: np.ndarray[tuple[int], np.dtype[np.uint8]], windows: list[int]) -> Batch:
        rows = np.stack([corpus[w * self.sequence : (w + 1) * self.sequence + 1] for w in windows])
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1], both[:, 1:]


def _joined(files: Iterator[Path]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    data = b"\n".join(path.read_bytes() for path in files)
    if not data:
        raise NotFoundError(
            "this Python has no standard library source to train on",
            hint="set data.entrypoint in the run file to a function of your own",
        )
    return np.frombuffer(data, dtype=np.uint8)
