"""Long commits. What a learner reads of a commit must not grow with the number of learners that it names.

A commit with more than WHOLE_ENTRIES inputs and outcomes is written as lines: a head, and parts. The head is the record
without its inputs and outcomes; it says how many there are and what a learner needs to know of all of them together,
and of each part the first learner, the length and the digest. Signature, checksum and hash chain cover the head, and
the head covers the parts. A part is a line with some of the inputs and outcomes; all of one learner are in one part. So
a learner reads the head and one part (commit_log.py), and whoever reads all of them gets the commit as it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from diloco_cli.digests import digest
from diloco_cli.store.port import HOLDER_BYTES

WHOLE_ENTRIES = 32  # a commit with no more is one line
PART_ENTRIES = 16  # at least, but for the last part
MAX_PARTS = 64
HEAD_BYTES = 16 << 10  # what a learner reads of a commit first; a longer head is read with all that follows

Plain = dict[str, Any]
LISTS = ("inputs", "outcomes")


class Part(msgspec.Struct, frozen=True):
    """One line: of `num_bytes`, without the line's end; `first` is the first learner that it names."""

    first: str
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=HOLDER_BYTES)]  # a learner reads as many, whoever wrote the head
    digest: str


class Parts(msgspec.Struct, frozen=True):
    """What a head says: the number of all inputs and of all outcomes, the inputs' tokens, the shortest step (seconds)
    that an input's learner states (0: none does), and where the parts are."""

    inputs: int
    outcomes: int
    tokens: int
    step_s: float
    index: tuple[Part, ...]

    def place_of(self, learner: str) -> int | None:
        """The part in which a learner's offers are, if they are in any; None: in none."""
        return next((place for place in reversed(range(len(self.index))) if self.index[place].first <= learner), None)

    def range_of(self, place: int, head_bytes: int) -> tuple[int, int]:
        """Where a part's line begins and ends behind a head of so many bytes."""
        start = head_bytes + 1 + sum(part.num_bytes + 1 for part in self.index[:place])
        return start, start + self.index[place].num_bytes

    def is_part(self, place: int, line: bytes) -> bool:
        return (len(line), digest(line)) == (self.index[place].num_bytes, self.index[place].digest)

    def are(self, lines: Sequence[bytes]) -> bool:
        return len(lines) == len(self.index) and all(self.is_part(place, line) for place, line in enumerate(lines))


def head_line(data: bytes) -> bytes:
    """The first line of a record; that is all of it, unless it is a long commit."""
    return data.partition(b"\n")[0]


def commit_digest(data: bytes) -> str:
    """By which the next commit names this one."""
    return digest(head_line(data))


def shortest_step_s(steps_s: Iterable[float]) -> float:
    return min((step_s for step_s in steps_s if step_s > 0), default=0.0)


def divided(commit: Plain, line: Callable[[Plain], bytes]) -> list[bytes]:
    """A commit as lines: one, or its head and its parts."""
    lists: dict[str, Sequence[Plain]] = {name: commit.get(name) or () for name in LISTS}
    total = sum(map(len, lists.values()))
    if total <= WHOLE_ENTRIES or not all(map(_is_sorted, lists.values())):
        return [line(commit)]
    parts = _parts(lists, max(PART_ENTRIES, -(-total // MAX_PARTS)))
    lines = [line(part) for part in parts]
    index = tuple(Part(_names(part)[0], len(data), digest(data)) for part, data in zip(parts, lines, strict=True))
    head = {name: value for name, value in commit.items() if name not in LISTS}
    return [line({**head, "parts": msgspec.to_builtins(_told(lists, index))}), *lines]


def _parts(lists: dict[str, Sequence[Plain]], most: int) -> list[Plain]:
    """Each of `most` entries, or somewhat more: a learner's own stay together."""
    of_learner: dict[str, dict[str, list[Plain]]] = {}
    for name, items in lists.items():
        for item in items:
            of_learner.setdefault(item["learner"], {name: [] for name in LISTS})[name].append(item)
    parts: list[Plain] = []
    for learner in sorted(of_learner):
        if not parts or sum(len(parts[-1][name]) for name in LISTS) >= most:
            parts.append({name: [] for name in LISTS})
        for name in LISTS:
            parts[-1][name] += of_learner[learner][name]
    return parts


def _told(lists: dict[str, Sequence[Plain]], index: tuple[Part, ...]) -> Parts:
    inputs = lists["inputs"]
    tokens, step_s = sum(item["tokens"] for item in inputs), shortest_step_s(item["step_s"] for item in inputs)
    return Parts(len(inputs), len(lists["outcomes"]), tokens, step_s, index)


def reunited(head: Plain, lines: Sequence[bytes], parsed: Callable[[bytes], Plain]) -> Plain:
    """The commit as it was before it was divided. Raises ValueError, or what `parsed` raises, where the lines are not
    those that the head names, or the head says something else of them than they do."""
    parts = parts_of(head)
    if len(lines) != len(parts.index):
        raise ValueError(f"{len(lines)} parts behind a head that names {len(parts.index)}")
    lists: dict[str, list[Plain]] = {name: [] for name in LISTS}
    last = ""
    for place, line in enumerate(lines):
        part = _part(parts, place, line, parsed)
        names = _names(part)
        if names[0] != parts.index[place].first or (place and names[0] <= last):
            raise ValueError(f"part {place} does not begin where its head says")
        last = names[-1]
        for name in LISTS:
            lists[name] += part[name]
    if _told(dict(lists), parts.index) != parts:
        raise ValueError("its head does not say what its parts do")
    return _with_lists(head, lists)


def of_one(head: Plain, learner: str, lines: Sequence[bytes], parsed: Callable[[bytes], Plain]) -> Plain:
    """The commit with one learner's inputs and outcomes alone, from its head and all its parts, or the one that holds
    them. Raises ValueError, as `reunited` does."""
    parts = parts_of(head)
    place = parts.place_of(learner)
    if place is None:
        return _with_lists(head, {name: [] for name in LISTS})
    if len(lines) not in (1, len(parts.index)):
        raise ValueError("a head without the part that it names")
    part = _part(parts, place, lines[0 if len(lines) == 1 else place], parsed)
    return _with_lists(head, {name: [item for item in part[name] if item["learner"] == learner] for name in LISTS})


def parts_of(head: Plain) -> Parts:
    """Raises msgspec.ValidationError."""
    return msgspec.convert(head.get("parts"), Parts)


def _part(parts: Parts, place: int, line: bytes, parsed: Callable[[bytes], Plain]) -> Plain:
    if not parts.is_part(place, line):
        raise ValueError(f"part {place} is not the one that its head names")
    part = parsed(line)
    if part.keys() != set(LISTS) or not all(isinstance(part[name], list) for name in LISTS) or not _names(part):
        raise ValueError(f"part {place} is not a part of a commit")
    return part


def _with_lists(head: Plain, lists: dict[str, list[Plain]]) -> Plain:
    given = {name: items for name, items in lists.items() if items or name == "outcomes"}
    return {name: value for name, value in head.items() if name != "parts"} | given


def _names(part: Plain) -> list[str]:
    """The learners in a part, sorted."""
    return sorted(item["learner"] for name in LISTS for item in part[name])


def _is_sorted(items: Sequence[Plain]) -> bool:
    return all(a["learner"] <= b["learner"] for a, b in pairwise(items))
