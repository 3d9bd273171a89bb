"""JSON from outside, read strictly: bounded in size and depth, without NaN, without duplicate keys."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MAX_DEPTH = 32
MAX_INTEGER = 20  # characters: what 64 bits hold


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
    """Whether a whole number in it needs more than 64 bits: arithmetic with such numbers may take any time."""
    if isinstance(value, dict):
        return any(map(has_huge_integer, value.values()))
    if isinstance(value, list):
        return any(map(has_huge_integer, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64
