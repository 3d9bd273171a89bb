"""Readers: one node -> one value, or an error that says what was expected. Bounds and units live here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from diloco_cli.config.yaml_tree import Node
from diloco_cli.digests import DIGEST, is_digest
from diloco_cli.errors import UsageError, suggestion

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Reader = Callable[[Node], Any]

MAX_REMEMBERED = 4096
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NAME_RULE = "lower-case letters, digits and '-', at most 63, beginning with a letter or digit"
ENTRYPOINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def described(**schema: Any) -> Callable[[F], F]:
    """A reader with the JSON Schema of what it accepts, as far as a schema can say it."""

    def mark(read: F) -> F:
        marked: Any = read
        marked.schema = schema
        return read

    return mark


def schema_of(read: Reader) -> dict[str, Any]:
    """Empty, which allows anything, for a reader that is not described."""
    return dict(getattr(getattr(read, "func", read), "schema", {}))  # `func`: of a partial


@described(type="string")
def text(node: Node) -> str:
    """A word or a quoted text. A bare number or `true` is refused: it must be quoted to be a text."""
    if not isinstance(node.value, str) or not node.value.strip():
        raise UsageError(f"must be text, not {shown(node)}", where=node.where)
    return node.value


@described(type=["string", "integer"])
def name(node: Node) -> str:
    """A name that may become part of an object key; a number such as 7 counts as the word it looks like."""
    if not isinstance(node.value, (str, int)) or NAME.fullmatch(node.text) is None:
        raise UsageError(f"must be a name ({NAME_RULE}), not {shown(node)}", where=node.where)
    return node.text


@described(type="string", pattern=f"^{ENTRYPOINT.pattern}$")
def entrypoint(node: Node) -> str:
    """`package.module:function`."""
    value = text(node)
    if ENTRYPOINT.fullmatch(value) is None:
        raise UsageError(f"must be package.module:function, not '{value}'", where=node.where)
    return value


@described(type="string", pattern=f"^{DIGEST.pattern}$")
def digest(node: Node) -> str:
    value = text(node)
    if not is_digest(value):
        raise UsageError(f"must be a digest, {DIGEST.pattern}, not '{value}'", where=node.where)
    return value


@described(type="boolean")
def boolean(node: Node) -> bool:
    if not isinstance(node.value, bool):
        raise UsageError(f"must be true or false, not {shown(node)}", where=node.where)
    return node.value


@described(type="integer")
def integer(node: Node) -> int:
    if not isinstance(node.value, int) or isinstance(node.value, bool):
        raise UsageError(f"must be a whole number, not {shown(node)}", where=node.where)
    return node.value


@described(type="number")
def number(node: Node) -> float:
    if not isinstance(node.value, (int, float)) or isinstance(node.value, bool):
        raise UsageError(f"must be a number, not {shown(node)}", where=node.where)
    if not math.isfinite(node.value):
        raise UsageError(f"must be a finite number, not {shown(node)}", where=node.where)
    return float(node.value)


def one_of(allowed: Sequence[str]) -> Reader:
    """One of a few words."""

    @described(enum=list(allowed))
    def read(node: Node) -> str:
        value = node.value
        if not isinstance(value, str) or value not in allowed:
            hint = suggestion(node.text, allowed)
            raise UsageError(f"must be one of {', '.join(allowed)}, not {shown(node)}{hint}", where=node.where)
        return value

    return read


def quantity(parse: Callable[[str], T]) -> Callable[[Node], T]:
    """A value with a unit, through one of the parsers of `units`."""
    parse = lru_cache(maxsize=MAX_REMEMBERED)(parse)  # a list of a thousand machines writes the same few quantities

    @described(type=["string", "number"])
    def read(node: Node) -> T:
        if isinstance(node.value, (dict, list, bool, type(None))):
            raise UsageError(f"must be a quantity with a unit, not {shown(node)}", where=node.where)
        try:
            return parse(node.text)
        except UsageError as error:
            raise UsageError(error.message, where=node.where) from None

    return read


def at_least(bound: float, read: Reader) -> Reader:
    return _bounded(read, lambda value: value >= bound, f"must be at least {bound:g}", minimum=bound)


def above(bound: float, read: Reader) -> Reader:
    return _bounded(read, lambda value: value > bound, f"must be above {bound:g}", exclusiveMinimum=bound)


def between(low: float, high: float, read: Reader) -> Reader:
    """Both ends included."""
    return _bounded(
        read, lambda value: low <= value <= high, f"must be from {low:g} to {high:g}", minimum=low, maximum=high
    )


def inside(low: float, high: float, read: Reader) -> Reader:
    """Both ends excluded."""
    return _bounded(
        read,
        lambda value: low < value < high,
        f"must be above {low:g} and below {high:g}",
        exclusiveMinimum=low,
        exclusiveMaximum=high,
    )


def from_zero_below(high: float, read: Reader) -> Reader:
    return _bounded(
        read,
        lambda value: 0 <= value < high,
        f"must be at least 0 and below {high:g}",
        minimum=0,
        exclusiveMaximum=high,
    )


def _bounded(read: Reader, holds: Callable[[Any], bool], rule: str, **bounds: float) -> Reader:
    inner = schema_of(read)

    @described(**inner, **(bounds if inner.get("type") in ("integer", "number") else {}))
    def bounded(node: Node) -> Any:
        value = read(node)
        if not holds(value):
            raise UsageError(f"{rule}, not {shown(node)}", where=node.where)
        return value

    return bounded


def either(word: str, read: Reader) -> Reader:
    """The word itself (`auto`), or what `read` reads."""

    @described(anyOf=[{"const": word}, schema_of(read)])
    def read_either(node: Node) -> Any:
        if node.value == word:
            return word
        try:
            return read(node)
        except UsageError as error:
            raise UsageError(f"{error.message}; '{word}' is allowed too", where=error.where) from None

    return read_either


def plain(node: Node) -> Any:
    """The node as plain Python data, for arguments that are handed on unread."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    if isinstance(node.value, float):
        return number(node)
    return node.value


def shown(node: Node) -> str:
    """A value for an error: its text, or its kind."""
    if isinstance(node.value, (dict, list)) or node.value is None:
        return node.kind
    written = node.text if len(node.text) <= 60 else node.text[:57] + "..."
    return f"'{written}'" if isinstance(node.value, str) else written
