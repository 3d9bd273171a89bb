"""Dataclasses <-> plain data that JSON holds exactly: how settings are frozen into runs and plan files."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from diloco_cli.config.fields import is_required, type_hints, without_none
from diloco_cli.errors import UsageError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses become dicts and tuples lists, all the way down. A dataclass with `OMITS_DEFAULTS` is written
    without the fields that have their default values: it is read back as it was."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        if getattr(value, "OMITS_DEFAULTS", False):
            fields = tuple(item for item in fields if getattr(value, item.name) != item.default)
        return {item.name: to_plain(getattr(value, item.name)) for item in fields}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any, *, strict: bool = True, path: str = "") -> T:
    """The inverse of `to_plain`, types checked. `strict=False` passes over keys of a newer minor version."""
    if not isinstance(data, dict):
        raise UsageError(f"{path or cls.__name__}: must be an object, not {type(data).__name__}")
    hints = type_hints(cls)
    unknown = [key for key in data if key not in hints]
    if strict and unknown:
        raise UsageError(f"{path or cls.__name__}: unknown key '{unknown[0]}'; allowed: {', '.join(hints)}")
    missing = [name for name in hints if name not in data and is_required(cls, name)]
    if missing:
        raise UsageError(f"{path or cls.__name__}: the key '{missing[0]}' is missing")
    prefix = f"{path}." if path else ""
    return cls(**{name: _decode(hints[name], data[name], strict, prefix + name) for name in hints if name in data})


def _decode(hint: Any, data: Any, strict: bool, path: str) -> Any:
    optional, hint = without_none(hint)
    if data is None and optional:
        return None
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_plain(hint, data, strict=strict, path=path)
    origin, members = get_origin(hint), get_args(hint)
    if origin is tuple and isinstance(data, list):
        return _decode_tuple(members, data, strict, path)
    if origin is dict and isinstance(data, dict):
        return {
            _key(members[0], key, path): _decode(members[1], item, strict, f"{path}.{key}")
            for key, item in data.items()
        }
    if origin is Union:
        return _decode_union(members, data, strict, path)
    return _decode_scalar(hint, data, path)


def _decode_tuple(members: tuple[Any, ...], data: list[Any], strict: bool, path: str) -> tuple[Any, ...]:
    """`tuple[X, ...]` of any length, or `tuple[X, Y]` of exactly that one."""
    kinds = [members[0]] * len(data) if members[-1] is Ellipsis else list(members)
    if len(kinds) != len(data):
        raise UsageError(f"{path}: must have {len(kinds)} items, not {len(data)}")
    pairs = enumerate(zip(kinds, data, strict=True))
    return tuple(_decode(kind, item, strict, f"{path}[{index}]") for index, (kind, item) in pairs)


def _key(kind: Any, text: str, path: str) -> Any:
    """JSON objects have text keys; a dict of integers is written with its numbers as text."""
    if kind is not int:
        return text
    if not text.isdecimal():
        raise UsageError(f"{path}: the key {text!r} must be a whole number")
    return int(text)


def _decode_union(members: tuple[Any, ...], data: Any, strict: bool, path: str) -> Any:
    for member in members:
        try:
            return _decode(member, data, strict, path)
        except UsageError:
            continue
    raise UsageError(f"{path}: {data!r} is none of the allowed kinds")


def _decode_scalar(hint: Any, data: Any, path: str) -> Any:
    if hint is Any:
        return data
    if get_origin(hint) is Literal and data in get_args(hint):
        return data
    if hint is float and isinstance(data, (int, float)) and not isinstance(data, bool) and math.isfinite(data):
        return float(data)
    if isinstance(hint, type) and type(data) is hint and hint is not float:
        return data
    allowed = ", ".join(map(str, get_args(hint))) or getattr(hint, "__name__", str(hint))
    raise UsageError(f"{path}: {data!r} is not allowed; allowed: {allowed}")
