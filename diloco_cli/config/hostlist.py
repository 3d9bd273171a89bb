"""Slurm's hostlists: `box[1-2,7],login` is box1, box2, box7, login; leading zeros are kept (`n[08-10]`).

Hostfiles are those of MPI and DeepSpeed: one host a line, words such as `slots=8` behind it, `#` for comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from diloco_cli.errors import UsageError

MAX_HOSTS = 10_000
MAX_HOST = 253  # characters: the domain name system allows no more
MAX_SHOWN = 200
ENTRY = re.compile(r"([A-Za-z0-9_.@:-]*)(?:\[([0-9,-]+)\]([A-Za-z0-9_.:-]*))?")
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
COUNTED = re.compile(r"(.*?)(\d{1,9})(\D*)")
WORD_OF_HOSTFILE = re.compile(r"[A-Za-z_-]+=\S*")
MAX_HOSTFILE_BYTES = 1_000_000
FORM = "write for example box[1-4], n[08-10,12] or a,b"


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Every host once, in the order written."""
    hosts: list[str] = []
    for entry in _entries(text):
        hosts += _expand(entry.strip(), shortened(text), MAX_HOSTS - len(hosts))
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"the hostlist '{shortened(text)}' names a host twice")
    return tuple(hosts)


def _entries(text: str) -> Iterator[str]:
    """The entries between commas outside of brackets."""
    start, inside = 0, False
    for at, character in enumerate(text):
        inside = character == "[" or (inside and character != "]")
        if character == "," and not inside:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def shortened(text: str) -> str:
    """The text for an error, cut to a line."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _expand(entry: str, text: str, room: int) -> list[str]:
    match = ENTRY.fullmatch(entry)
    if not entry or entry.startswith("-") or match is None:
        raise UsageError(f"the hostlist '{text}' cannot be read at '{shortened(entry)}'; {FORM}")
    prefix, ranges, suffix = match.groups()
    if len(prefix) + len(suffix or "") > MAX_HOST:
        raise UsageError(f"the hostlist '{text}' holds a name longer than {MAX_HOST} characters")
    if ranges is None:
        if room < 1:
            raise UsageError(f"the hostlist '{text}' names more than {MAX_HOSTS} hosts")
        return [entry]
    numbers: list[str] = []
    for part in ranges.split(","):
        numbers += _numbers(part, text, room - len(numbers))
    return [f"{prefix}{number}{suffix}" for number in numbers]


def _numbers(part: str, text: str, room: int) -> list[str]:
    match = RANGE.fullmatch(part)
    if match is None:
        raise UsageError(f"the hostlist '{text}' cannot be read at '[{part}]'; {FORM}")
    first, last = match[1], match[2] or match[1]
    count = int(last) - int(first) + 1
    if count < 1:
        raise UsageError(f"the hostlist '{text}' counts backwards at '[{part}]'; {FORM}")
    if count > room:
        raise UsageError(f"the hostlist '{text}' names more than {MAX_HOSTS} hosts")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Every host once, in the order of the lines. Words behind a host (`slots=8`) are ignored, because the inventory
    gives a host's accelerators. Raises UsageError: with the file's line, or without a place if there is no such
    file."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_HOSTFILE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read the hostfile {path}: {reason}") from None
    if len(raw) > MAX_HOSTFILE_BYTES:
        raise UsageError(f"the hostfile is larger than {MAX_HOSTFILE_BYTES // 10**6} MB", where=str(path))
    seen: dict[str, str] = {}
    for place, line in _lines_of_hosts(raw.decode("utf-8", errors="replace"), path):
        for host in _hosts_of_line(line, place):
            if host in seen:
                raise UsageError(f"the host '{host}' is named twice (before: {seen[host]})", where=place)
            seen[host] = place
    if not 1 <= len(seen) <= MAX_HOSTS:
        raise UsageError(f"a hostfile names 1 to {MAX_HOSTS} hosts, not {len(seen)}", where=str(path))
    return tuple(seen)


def _lines_of_hosts(text: str, path: Path) -> Iterator[tuple[str, str]]:
    """(place, line) without comments and empty lines."""
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            yield f"{path}:{number}", content


def _hosts_of_line(line: str, place: str) -> tuple[str, ...]:
    host, *words = line.split()
    strange = [word for word in words if WORD_OF_HOSTFILE.fullmatch(word) is None]
    if strange:
        raise UsageError(
            f"'{strange[0]}' behind the host '{host}' cannot be read; allowed: words such as slots=8", where=place
        )
    try:
        return expand_hostlist(host)
    except UsageError as error:
        raise UsageError(error.message, where=place) from None


def compress_hostlist(hosts: Iterable[str]) -> str:
    """The short form of many hosts, in their order: box1, box2, box3, login is `box[1-3],login`."""
    pieces = []
    for _, run in groupby(enumerate(hosts), key=_place_in_a_run):
        names = [host for _, host in run]
        match = COUNTED.fullmatch(names[0])
        if match is None or len(names) == 1:
            pieces += names
        else:
            last = COUNTED.fullmatch(names[-1])
            pieces.append(f"{match[1]}[{match[2]}-{last[2] if last else ''}]{match[3]}")
    return ",".join(pieces)


def _place_in_a_run(item: tuple[int, str]) -> tuple[str, ...]:
    """A key that is equal for hosts with consecutive numbers: the text around the number, its digits, its distance."""
    index, host = item
    match = COUNTED.fullmatch(host)
    if match is None:
        return (host, str(index))
    return (match[1], match[3], str(int(match[2]) - index), str(len(match[2])) if match[2].startswith("0") else "")
