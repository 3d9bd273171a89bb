"""Dataclasses <-> plain data that JSON holds exactly: how settings are frozen into runs and plan files.

The readers and writers of a type are built once per type, because many records are read and written.

`parse_object` reads JSON from outside strictly: bounded in size and depth, without NaN, without duplicate keys.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable
from functools import cache
from math import isfinite
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from diloco_cli.errors import UsageError

T = TypeVar("T")
_SCALARS = frozenset((str, int, float, bool, type(None)))
MAX_DEPTH = 32
MAX_INTEGER = 20  # characters of a 64-bit integer


def is_local(item: dataclasses.Field[Any]) -> bool:
    """Whether the field belongs to this process alone: it is never written and never read."""
    return bool(item.metadata.get("local"))


@cache
def type_hints(cls: Any) -> dict[str, Any]:
    """Types of a dataclass's fields, in their order, without local fields."""
    hints = get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls) if not is_local(item)}


@cache
def required_fields(cls: Any) -> frozenset[str]:
    """The names of those without a default."""
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return frozenset(item.name for item in fields if item.default is missing and item.default_factory is missing)


def without_none(hint: Any) -> tuple[bool, Any]:
    """(may it be None, the type without None)."""
    if get_origin(hint) not in (Union, types.UnionType):
        return False, hint
    members = tuple(member for member in get_args(hint) if member is not type(None))
    optional = len(members) < len(get_args(hint))
    return optional, members[0] if len(members) == 1 else Union[members]  # noqa: UP007


Path = tuple[Any, str]  # (the path before, the last part): joined only when an error names it
Decoder = Callable[[Any, bool, Path | None], Any]


def to_plain(value: Any) -> Any:
    """Dataclasses and msgspec's Structs become dicts and tuples lists, all the way down."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if _is_struct(kind):
        return _msgspec().to_builtins(value)
    if not dataclasses.is_dataclass(kind):
        return value
    values = vars(value)
    return {name: values[name] if type(values[name]) in _SCALARS else to_plain(values[name]) for name in _written(kind)}


@cache
def _written(cls: type) -> tuple[str, ...]:
    """The fields that are not local."""
    return tuple(item.name for item in dataclasses.fields(cls) if not is_local(item))


def _is_struct(cls: type) -> bool:
    return hasattr(cls, "__struct_fields__")


def _msgspec() -> Any:
    """Imported only when there is a Struct to read or write: most commands do not need it."""
    import msgspec

    return msgspec


def from_plain(cls: type[T], data: Any, *, strict: bool = True) -> T:
    """The inverse of `to_plain`, types checked. `strict=False` ignores keys of a newer minor version."""
    decode: Decoder = _object_decoder(cast("Any", cls))
    return cast("T", decode(data, strict, None))


def _text(path: Path | None) -> str:
    return "" if path is None else _text(path[0]) + path[1]


def _field(path: Path | None, name: str) -> Path:
    return (path, f".{name}") if path is not None else (None, name)


@cache
def _decoder(hint: Any) -> Decoder:
    """Data of one annotated type, checked. Raises UsageError that names the path."""
    optional, bare = without_none(hint)
    decode = _bare_decoder(bare)
    if not optional:
        return decode
    return lambda data, strict, path: None if data is None else decode(data, strict, path)


def _bare_decoder(hint: Any) -> Decoder:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _object_decoder(hint)
    if isinstance(hint, type) and _is_struct(hint):
        return _struct_decoder(hint)
    origin, members = get_origin(hint), get_args(hint)
    scalar = _scalar_decoder(hint)
    if origin is tuple:
        items = _tuple_decoder(members)
        return lambda data, strict, path: (items if isinstance(data, list) else scalar)(data, strict, path)
    if origin is dict:
        entries = _dict_decoder(members)
        return lambda data, strict, path: (entries if isinstance(data, dict) else scalar)(data, strict, path)
    return _union_decoder(members) if origin is Union else scalar


@cache
def _object_decoder(cls: Any) -> Decoder:
    fields: list[tuple[str, bool, Decoder]] = []

    def decode(data: Any, strict: bool, path: Path | None) -> Any:
        if not isinstance(data, dict):
            raise UsageError(f"{_text(path) or cls.__name__}: must be an object, not {type(data).__name__}")
        if not fields:  # at the first use, because a type may contain itself
            required = required_fields(cls)
            fields.extend((name, name in required, _decoder(hint)) for name, hint in type_hints(cls).items())
        if strict:
            _refuse_unknown(cls, data, path)
        for name, is_required, _ in fields:
            if is_required and name not in data:
                raise UsageError(f"{_text(path) or cls.__name__}: the key '{name}' is missing")
        return cls(**{
            name: decoder(data[name], strict, (path, f".{name}") if path is not None else (None, name))
            for name, _, decoder in fields if name in data
        })  # fmt: skip

    return decode


def _struct_decoder(cls: Any) -> Decoder:
    def decode(data: Any, strict: bool, path: Path | None) -> Any:
        unknown = set(data) - set(cls.__struct_fields__) if strict and isinstance(data, dict) else None
        if unknown:
            raise UsageError(f"{_text(path) or cls.__name__}: unknown key '{min(unknown)}'")
        try:
            return _msgspec().convert(data, cls)
        except _msgspec().ValidationError as error:
            raise UsageError(f"{_text(path) or cls.__name__}: {error}") from error

    return decode


def _refuse_unknown(cls: Any, data: dict[str, Any], path: Path | None) -> None:
    hints = type_hints(cls)
    unknown = [key for key in data if key not in hints]
    if unknown:
        raise UsageError(f"{_text(path) or cls.__name__}: unknown key '{unknown[0]}'; allowed: {', '.join(hints)}")


def _tuple_decoder(members: tuple[Any, ...]) -> Decoder:
    """`tuple[X, ...]` of any length, or `tuple[X, Y]` of exactly that one."""
    decoders = [_decoder(member) for member in members if member is not Ellipsis]
    any_length = members[-1] is Ellipsis

    def decode(data: Any, strict: bool, path: Path | None) -> Any:
        each = decoders * len(data) if any_length else decoders
        if len(each) != len(data):
            raise UsageError(f"{_text(path)}: must have {len(each)} items, not {len(data)}")
        pairs = enumerate(zip(each, data, strict=True))
        return tuple(decoder(item, strict, (path, f"[{index}]")) for index, (decoder, item) in pairs)

    return decode


def _dict_decoder(members: tuple[Any, ...]) -> Decoder:
    kind, decoder = members[0], _decoder(members[1])

    def decode(data: Any, strict: bool, path: Path | None) -> Any:
        return {_key(kind, key, path): decoder(item, strict, _field(path, key)) for key, item in data.items()}

    return decode


def _key(kind: Any, text: str, path: Path | None) -> Any:
    """JSON objects have text keys; a dict of integers is written with its numbers as text."""
    if kind is not int:
        return text
    if not text.isdecimal():
        raise UsageError(f"{_text(path)}: the key {text!r} must be a whole number")
    return int(text)


def _union_decoder(members: tuple[Any, ...]) -> Decoder:
    decoders = [_decoder(member) for member in members]

    def decode(data: Any, strict: bool, path: Path | None) -> Any:
        for decoder in decoders:
            try:
                return decoder(data, strict, path)
            except UsageError:
                continue
        raise UsageError(f"{_text(path)}: {data!r} is none of the allowed kinds")

    return decode


def _scalar_decoder(hint: Any) -> Decoder:
    values = get_args(hint) if get_origin(hint) is Literal else None
    exact = hint if isinstance(hint, type) and hint is not float else None

    def decode(data: Any, strict: bool, path: Path | None) -> Any:
        if (exact is not None and type(data) is exact) or hint is Any or (values is not None and data in values):
            return data
        if hint is float and isinstance(data, (int, float)) and not isinstance(data, bool) and math.isfinite(data):
            return float(data)
        allowed = ", ".join(map(str, get_args(hint))) or getattr(hint, "__name__", str(hint))
        raise UsageError(f"{_text(path)}: {data!r} is not allowed; allowed: {allowed}")

    return decode


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
