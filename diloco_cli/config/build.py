"""Nodes -> settings dataclasses: the fields are the schema; rules add units, bounds, other spellings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import Struct, structs

from diloco_cli.config import readers
from diloco_cli.config.readers import Reader
from diloco_cli.config.yaml_tree import Node
from diloco_cli.errors import UsageError, suggestion

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """How one field is written: `key` if the file has another name for it, `read` if its type is not enough."""

    read: Reader | None = None
    key: str | None = None


@cache
def type_hints(cls: Any) -> dict[str, Any]:
    """Types of the fields, in their order."""
    hints = get_type_hints(cls)
    names = cls.__struct_fields__ if issubclass(cls, Struct) else [item.name for item in dataclasses.fields(cls)]
    return {name: hints[name] for name in names}


@cache
def required_fields(cls: Any) -> frozenset[str]:
    """The names of those without a default."""
    if issubclass(cls, Struct):
        return frozenset(item.name for item in structs.fields(cls) if item.required)
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return frozenset(item.name for item in fields if item.default is missing and item.default_factory is missing)


def without_none(hint: Any) -> tuple[bool, Any]:
    """(may it be None, the type without None)."""
    if get_origin(hint) not in (Union, UnionType):
        return False, hint
    members = tuple(member for member in get_args(hint) if member is not type(None))
    optional = len(members) < len(get_args(hint))
    return optional, members[0] if len(members) == 1 else Union[members]  # noqa: UP007


def _is_type(hint: Any) -> bool:
    """Whether it has fields of its own."""
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Struct))


RENAMED = {"broadcast": "weights_codec"}
"""Keys of earlier versions, and their present names."""
Rules = Mapping[type, Mapping[str, Rule]]
Origins = dict[str, str]


@dataclass(frozen=True)
class _Field:
    """The schema of one field: its type without None, and its reader."""

    name: str
    optional: bool
    required: bool
    hint: Any
    read: Reader | None


@dataclass
class Builder:
    """Builds settings by `rules` and remembers where each value came from: {"sync.every": "run.yaml:12"}. `hints`: what
    to say of a class's unknown keys."""

    rules: Rules
    hints: Mapping[type, str] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    schemas: dict[type, dict[str, _Field]] = field(default_factory=dict)

    def build(self, cls: type[T], node: Node, path: str = "") -> T:
        """One dataclass. Unknown and missing keys are errors; a missing key with a default keeps it."""
        if not isinstance(node.value, dict):
            raise UsageError(f"{_at(path)}must be a mapping, not {readers.shown(node)}", where=node.where)
        schema = self._schema(cls)
        for key, child in node.value.items():
            if RENAMED.get(key) in schema:
                raise UsageError(f"{_at(path)}the key '{key}' is called '{RENAMED[key]}' now", where=child.where)
            if key not in schema:
                known = f"{suggestion(key, schema)}; allowed: {', '.join(schema)}"
                raise UsageError(f"{_at(path)}unknown key '{key}'{known}", where=child.where, hint=self.hints.get(cls))
        values = {
            schema[key].name: self._value(schema[key], child, _join(path, key)) for key, child in node.value.items()
        }
        for key, entry in schema.items():
            if entry.required and key not in node.value:
                raise UsageError(f"{_at(path)}the key '{key}' is missing", where=node.where)
        return cls(**values)

    def schema(self, cls: type) -> dict[str, Any]:
        """The JSON Schema of what `build` accepts: no key but those of the class."""
        fields = self._schema(cls)
        return {
            "type": "object",
            "properties": {key: self._field_schema(entry) for key, entry in fields.items()},
            "required": [key for key, entry in fields.items() if entry.required],
            "additionalProperties": False,
        }

    def _field_schema(self, entry: _Field) -> dict[str, Any]:
        found = self._type_schema(entry)
        return {"anyOf": [found, {"type": "null"}]} if entry.optional else found

    def _type_schema(self, entry: _Field) -> dict[str, Any]:
        hint = entry.hint
        if entry.read is not None:
            return readers.schema_of(entry.read)
        if _is_type(hint):
            return self.schema(hint)
        origin, members = get_origin(hint), get_args(hint)
        item: Any = members[0 if origin is tuple else -1] if origin in (tuple, dict) else None
        if not _is_type(item):
            return readers.schema_of(reader_for(hint))
        if origin is tuple:
            return {"type": "array", "items": self.schema(item)}
        named = self.schema(item)
        named["properties"].pop("name", None)
        named["required"] = [key for key in named["required"] if key != "name"]
        return {"type": "object", "additionalProperties": {"anyOf": [named, {"type": "null"}]}}

    def keys(self, cls: type) -> Iterator[tuple[str, Any]]:
        """The keys of a class, with their types."""
        return ((key, entry.hint) for key, entry in self._schema(cls).items())

    def _schema(self, cls: type) -> dict[str, _Field]:
        """The fields of a class by their keys, in order."""
        if cls not in self.schemas:
            self.schemas[cls] = {}
            for name, hint in type_hints(cls).items():
                rule = self.rules.get(cls, {}).get(name, Rule())
                optional, plain = without_none(hint)
                required = name in required_fields(cls)
                self.schemas[cls][rule.key or name] = _Field(name, optional, required, plain, rule.read)
        return self.schemas[cls]

    def _value(self, entry: _Field, node: Node, path: str) -> Any:
        """One field, by its rule or else by its type."""
        if node.value is None and entry.optional:
            return None
        if entry.read is None:
            nested = self._nested(entry.hint, node, path)
            if nested is not None:
                return nested
        self.origins[path] = node.where
        try:
            return (entry.read or reader_for(entry.hint))(node)
        except UsageError as error:
            raise UsageError(f"{path}: {error.message}", where=error.where, hint=error.hint) from None

    def _nested(self, hint: Any, node: Node, path: str) -> Any:
        """A dataclass, a tuple of them, or a mapping of names to them; None if the field is none of these."""
        if _is_type(hint):
            return self.build(hint, node, path)
        origin, members = get_origin(hint), get_args(hint)
        item: Any = members[0 if origin is tuple else -1] if origin in (tuple, dict) else None
        if not _is_type(item):
            return None
        cls: Any = item
        return self._list(cls, node, path) if origin is tuple else self.build_named(cls, node, path)

    def _list(self, cls: type[T], node: Node, path: str) -> tuple[T, ...]:
        if not isinstance(node.value, list):
            raise UsageError(f"{path}: must be a list, not {readers.shown(node)}", where=node.where)
        return tuple(self.build(cls, child, _item(path, index, child)) for index, child in enumerate(node.value))

    def build_named(self, cls: type[T], node: Node, path: str) -> dict[str, T]:
        """{name: {...}}; a class with a field `name` gets the key as its name."""
        if not isinstance(node.value, dict):
            raise UsageError(f"{path}: must be a mapping of names, not {readers.shown(node)}", where=node.where)
        return {
            key: self.build(cls, _with_name(cls, key, child), _join(path, key)) for key, child in node.value.items()
        }


def reader_for(hint: Any) -> Reader:
    """The reader that a type implies."""
    simple: dict[Any, Reader] = {
        str: readers.text, bool: readers.boolean, int: readers.integer, float: readers.number,
    }  # fmt: skip
    if hint in simple:
        return simple[hint]
    if get_origin(hint) is Literal:
        return readers.one_of(get_args(hint))
    if get_origin(hint) is dict:
        return arguments
    raise TypeError(f"no reader for the type {hint}: give the field a rule")


@readers.described(type="object")
def arguments(node: Node) -> dict[str, Any]:
    if not isinstance(node.value, dict):
        raise UsageError(f"must be a mapping, not {readers.shown(node)}", where=node.where)
    return {key: readers.plain(child) for key, child in node.value.items()}


def _with_name(cls: type, key: str, node: Node) -> Node:
    if "name" not in type_hints(cls) or not isinstance(node.value, dict):
        return Node({}, node.where) if node.value is None else node
    if "name" in node.value:
        raise UsageError(f"{key}: unknown key 'name'; the key '{key}' is the name", where=node.value["name"].where)
    return Node({"name": Node(key, node.where, key), **node.value}, node.where)


def _item(path: str, index: int, node: Node) -> str:
    """`islands.iowa` where the item has a name, else `islands[2]`."""
    named = node.value.get("name") if isinstance(node.value, dict) else None
    return f"{path}.{named.text}" if named is not None and named.text else f"{path}[{index}]"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _at(path: str) -> str:
    return f"{path}: " if path else ""
