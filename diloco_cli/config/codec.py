"""Dataclasses <-> plain data that JSON holds exactly: how settings are frozen into runs and plan files.

What a type's annotations ask for is worked out once per type: records are read and written by the thousand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from diloco_cli.config.fields import is_local, required_fields, type_hints, without_none
from diloco_cli.errors import UsageError

T = TypeVar("T")
Path = tuple[Any, str]  # (what is before, the last part): put together only where an error names it
Decoder = Callable[[Any, bool, Path | None], Any]
_SCALARS = frozenset((str, int, float, bool, type(None)))


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
    """Only where there is a Struct to read or write: most commands do without."""
    import msgspec

    return msgspec


def from_plain(cls: type[T], data: Any, *, strict: bool = True) -> T:
    """The inverse of `to_plain`, types checked. `strict=False` passes over keys of a newer minor version."""
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
        if not fields:  # only now: a type may hold itself
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
