"""Settings and records <-> plain data that JSON holds exactly: how settings are frozen into runs and plan files.

`parse_object` reads JSON from outside strictly: bounded in size and depth, without NaN, without duplicate keys.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from diloco_cli.errors import UsageError

T = TypeVar("T")
_SCALARS = frozenset((str, int, float, bool, type(None)))
MAX_DEPTH = 32
MAX_INTEGER = 20  # characters of a 64-bit integer
_MISSING = re.compile(r"Object missing required field `(.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


if TYPE_CHECKING:  # whose types know the fields of both
    from dataclasses import replace as replace  # noqa: PLC0414 - a type checker takes it for exported
else:

    def replace(value: T, /, **changes: Any) -> T:
        """A copy of a Struct or a dataclass with some fields changed (as copy.replace of Python 3.13)."""
        of = msgspec.structs.replace if isinstance(value, msgspec.Struct) else dataclasses.replace
        return of(value, **changes)


def to_plain(value: Any) -> Any:
    """Dataclasses and Structs become dicts and tuples lists, all the way down. A dataclass's field with the metadata
    `local` belongs to this process alone: it is neither written nor read."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if not dataclasses.is_dataclass(kind):
        return value
    return {name: to_plain(getattr(value, name)) for name in _written(kind)}


@cache
def _written(cls: type) -> tuple[str, ...]:
    """The fields that are not local."""
    return tuple(item.name for item in dataclasses.fields(cls) if not item.metadata.get("local"))


def from_plain(cls: type[T], data: Any, *, strict: bool = True) -> T:
    """The inverse of `to_plain`, with types and bounds checked. `strict=False` ignores keys that a dataclass does not
    know; a Struct that forbids them refuses them always. Raises UsageError that names the path."""
    try:
        found = msgspec.convert(data, cls, str_keys=True)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        problem = _MISSING.sub(r"the key '\1' is missing", _UNKNOWN.sub(r"unknown key '\1'", problem))
        raise UsageError(f"{path.strip('.`') or cls.__name__}: {problem}") from error
    if strict:
        _refuse_unknown(data, to_plain(found), cls.__name__)
    return found


def _refuse_unknown(data: Any, known: Any, path: str) -> None:
    """msgspec passes over the keys that a dataclass does not know: here they are errors, too."""
    if isinstance(data, dict) and isinstance(known, dict):
        for key, value in data.items():
            if key not in known:
                raise UsageError(f"{path}: unknown key '{key}'; allowed: {', '.join(known)}")
            _refuse_unknown(value, known[key], f"{path}.{key}")
    elif isinstance(data, list) and isinstance(known, list):
        for index, (value, read) in enumerate(zip(data, known, strict=True)):
            _refuse_unknown(value, read, f"{path}[{index}]")


def changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """`("sync.every", 40, 80)` of plain settings, in the order of names; None: it is not there."""
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}", before, after


def parse_object(data: bytes | str, max_bytes: int) -> dict[str, Any]:
    """The object; ValueError with the reason for anything else. (`json` alone takes NaN for a number and 1e999 for
    infinity, lets the last of two equal keys win, and exhausts the stack on deep nesting.)"""
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes, more than the {max_bytes} allowed")
    try:
        found = json.loads(
            data,
            object_pairs_hook=_unique_pairs,
            parse_constant=_no_constant,
            parse_float=_finite_number,
            parse_int=_bounded_integer,
        )
    except RecursionError as error:
        raise ValueError(f"not an object of at most {MAX_DEPTH} levels") from error
    if not isinstance(found, dict) or is_deep(found):
        raise ValueError(f"not an object of at most {MAX_DEPTH} levels")
    return found


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key appears twice")
    return unique


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _finite_number(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def _bounded_integer(text: str) -> int:
    if len(text) > MAX_INTEGER:
        raise ValueError(f"{text[:40]} is too large a number")
    return int(text)


def is_deep(value: Any) -> bool:
    """Whether there are more than MAX_DEPTH levels, counted no further than that."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
    return depth > MAX_DEPTH


def has_huge_integer(value: Any) -> bool:
    """Whether it has an integer of more than 128 bits: arithmetic with such integers may take very long."""
    if isinstance(value, dict):
        return any(map(has_huge_integer, value.values()))
    if isinstance(value, list):
        return any(map(has_huge_integer, value))
    return isinstance(value, int) and not -(2**127) <= value < 2**128
