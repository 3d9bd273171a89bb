"""Signs of life of an island's ranks, in a small file that each of them shares with their parent: no device and no
collective is needed to write or to read it, so it tells the truth also where those hang."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.environment import environment_value
from diloco_cli.learner.place import BEATS_VARIABLE, RankPlace

_SLOT = struct.Struct("<qq")


@dataclass(frozen=True)
class RankCount:
    """What one rank has done: commands, waits and steps together, and steps alone."""

    beats: int = 0
    steps: int = 0


class RankBeats:
    """One rank's own counters. Without a file nobody reads them, and they go nowhere."""

    def __init__(self, path: Path | None, slot: int) -> None:
        self._at, self._beats, self._steps = slot * _SLOT.size, 0, 0
        self._map: mmap.mmap | None = None
        if path is not None:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)

    def beat(self) -> None:
        """Of the thread that trains, and of no other: a thread beside it lives on where it hangs."""
        self._beats += 1
        if self._map is not None:
            _SLOT.pack_into(self._map, self._at, self._beats, self._steps)

    def stepped(self) -> None:
        self._steps += 1
        self.beat()


def own_beats(place: RankPlace | None) -> RankBeats:
    path = environment_value(BEATS_VARIABLE)
    if place is None or not path or not place.has_parent:
        return RankBeats(None, 0)
    return RankBeats(Path(path), place.local_rank)


def make_beats(path: Path, ranks: int) -> None:
    path.write_bytes(bytes(ranks * _SLOT.size))


def read_beats(path: Path) -> list[RankCount]:
    """Of each rank of this node, in their order."""
    return [RankCount(beats, steps) for beats, steps in _SLOT.iter_unpack(path.read_bytes())]
