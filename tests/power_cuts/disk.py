"""A file system without a journal, as far as a power cut is concerned.

What POSIX promises, and no more (the model of ext2, or of ext4 without journal):

- the bytes of a file are on the disk once `fsync` of the file has returned; before that any part of them may be there:
  nothing, the first half, the right length filled with zeros, the second half alone, all of it;
- the entries of a directory (create, link, rename, unlink, mkdir) are on the disk once `fsync` of that directory has
  returned; before that each name has, independently of every other, one of the values it has had since;
- nothing orders one of these against another. A rename is the entry of the new name and the end of the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from random import Random
from typing import Any, Literal

ROOT = 0
OpKind = Literal["entry", "write", "sync"]
Tree = dict[str, "bytes | None"]
"""By path below the root: the bytes of a file, None for a directory."""


Place = tuple[int, "str | None"]
"""A name in a directory, or the bytes of a file."""


@dataclass(frozen=True)
class Op:
    """`entry`: the name in directory `node` now means `target` (None: nothing). `write`: `data` is appended to file
    `node`. `sync`: fsync of `node`. `asker`: the function that asked for it."""

    kind: OpKind
    node: int
    name: str = ""
    target: int | None = None
    data: bytes = b""
    asker: str = ""


@dataclass
class File:
    data: bytes = b""
    durable_bytes: int = 0

    def contents(self) -> list[bytes]:
        """Everything that may be found in it after a cut."""
        kept, rest = self.data[: self.durable_bytes], self.data[self.durable_bytes :]
        half = len(rest) // 2
        zeros = bytes(half)
        variants = [kept, kept + rest[:half], kept + bytes(len(rest)), kept + zeros + rest[half:], self.data]
        return list(dict.fromkeys(variants))


@dataclass
class Directory:
    """By name: what it means on the disk for certain, and what else it may mean."""

    durable: dict[str, int | None] = field(default_factory=dict)
    pending: dict[str, list[int | None]] = field(default_factory=dict)

    def meanings(self, name: str) -> list[int | None]:
        return list(dict.fromkeys([self.durable.get(name), *self.pending.get(name, [])]))

    def sync(self) -> None:
        for name, values in self.pending.items():
            self.durable[name] = values[-1]
        self.pending.clear()


class Disk:
    """Ops are played onto it one by one; `states` are all that a cut at this moment may leave."""

    def __init__(self, directories: Sequence[int] = ()) -> None:
        self.directories: dict[int, Directory] = {node: Directory() for node in (ROOT, *directories)}
        self.files: dict[int, File] = {}

    def play(self, op: Op) -> None:
        if op.kind == "write":
            file = self.files.setdefault(op.node, File())
            file.data += op.data
        elif op.kind == "entry":
            self.directories[op.node].pending.setdefault(op.name, []).append(op.target)
        elif op.node in self.directories:
            self.directories[op.node].sync()
        else:
            file = self.files.setdefault(op.node, File())
            file.durable_bytes = len(file.data)

    def states(self, most: int, chance: Random) -> Iterator[Tree]:
        """At most about so many trees: all that are legal, or if those are more: what is certain alone, everything that
        was asked for, then in turn each of these two with one thing different, and whatever the generator draws."""
        choices = self._choices()
        for number, chosen in enumerate(_vectors([len(options) for _, options in choices], most, chance)):
            if number == most:
                return
            picked = {place: options[index] for (place, options), index in zip(choices, chosen, strict=True)}
            yield dict(self._below(ROOT, "", picked))

    def _choices(self) -> list[tuple[Place, Sequence[Any]]]:
        """Every place where more than one thing may be found, the certain one first, the newest last."""
        names = [
            ((node, name), directory.meanings(name))
            for node, directory in sorted(self.directories.items())
            for name in sorted(directory.pending)
        ]
        contents = [((node, None), self.files[node].contents()) for node in sorted(self.files)]
        return [(place, options) for place, options in [*names, *contents] if len(options) > 1]

    def _below(self, node: int, path: str, picked: dict[Place, Any]) -> Iterator[tuple[str, bytes | None]]:
        directory = self.directories[node]
        for name in sorted({*directory.durable, *directory.pending}):
            place = (node, name)
            target = picked[place] if place in picked else directory.meanings(name)[0]
            if target in self.directories:
                yield f"{path}{name}", None
                yield from self._below(target, f"{path}{name}/", picked)
            elif target is not None:
                file = self.files.get(target, File())
                yield f"{path}{name}", picked.get((target, None), file.data)


def _vectors(sizes: list[int], most: int, chance: Random) -> Iterator[tuple[int, ...]]:
    """Choices of one index below each size."""
    if prod(sizes) <= most:
        yield from product(*map(range, sizes))
        return
    extremes = [tuple(0 for _ in sizes), tuple(size - 1 for size in sizes)]
    yield from extremes
    while True:
        for whole in extremes:
            at = chance.randrange(len(sizes))
            yield (*whole[:at], chance.randrange(sizes[at]), *whole[at + 1 :])
        yield tuple(chance.randrange(size) for size in sizes)
