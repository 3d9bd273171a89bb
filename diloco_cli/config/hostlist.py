"""Slurm's hostlists: `box[1-2,7],login` is box1, box2, box7, login; leading zeros are kept (`n[08-10]`)."""

from __future__ import annotations

import re

from diloco_cli.errors import UsageError

MOST_HOSTS = 10_000
ENTRY = re.compile(r"([A-Za-z0-9_.@:-]*)(?:\[([0-9,-]+)\])?([A-Za-z0-9_.:-]*)")
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
FORM = "write for example box[1-4], n[08-10,12] or a,b"


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Every host once, in the order written."""
    hosts: list[str] = []
    for entry in re.split(r",(?![^\[]*\])", text):
        hosts += _expand(entry.strip(), text, MOST_HOSTS - len(hosts))
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"the hostlist '{text}' names a host twice")
    return tuple(hosts)


def _expand(entry: str, text: str, room: int) -> list[str]:
    match = ENTRY.fullmatch(entry)
    if not entry or entry.startswith("-") or match is None:
        raise UsageError(f"the hostlist '{text}' cannot be read at '{entry}'; {FORM}")
    prefix, ranges, suffix = match.groups()
    if ranges is None:
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
        raise UsageError(f"the hostlist '{text}' names more than {MOST_HOSTS} hosts")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
