"""What a dataclass's annotations say about its fields: shared by the YAML builder and the JSON codec."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints


def is_local(item: dataclasses.Field[Any]) -> bool:
    """Is the field only this process's own: never written, and never read from what others write?"""
    return bool(item.metadata.get("local"))


@cache
def type_hints(cls: Any) -> dict[str, Any]:
    """Types of a dataclass's fields, in their order; local ones are nobody's business."""
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
