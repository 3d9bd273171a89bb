"""YAML text -> a tree of nodes with their file and line. Stricter than YAML.

Built from parser events, so no object is ever constructed from a tag. Refused: duplicate keys, anchors,
aliases, tags, several documents, keys that are no plain text, deep nesting, large files. Scalars follow
YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema): `1e-4` is a number and `no` is a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from diloco_cli.errors import UsageError

MAX_FILE_BYTES = 8_000_000
DEEPEST_NESTING = 12
MAX_SCALAR = 4096
MAX_SHOWN = 60  # characters of a value in an error

INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
NUMBERS_BEGIN_WITH = frozenset("+-.0123456789")
CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}

Kind = Literal["run file", "inventory", "plan"]
ONLY_IN: dict[Kind, frozenset[str]] = {
    "run file": frozenset({"model", "data", "train", "sync", "outer", "inventory"}),
    "inventory": frozenset({"store", "islands", "machines", "regions"}),
    "plan": frozenset({"format", "plan", "digest"}),
}
HINTS: dict[tuple[str, Kind], str] = {  # (what was given, what it was given as)
    ("inventory", "run file"): "diloco plan {path} -f RUN plans it; a run file names it: inventory: {name}",
    ("run file", "inventory"): "diloco plan -f {path}, which takes the inventory that this run file names",
    ("plan", "run file"): "diloco launch {path}",
    ("plan", "inventory"): "diloco launch {path}",
}

Value = str | int | float | bool | None | list["Node"] | dict[str, "Node"]


@dataclass(slots=True)
class Node:
    """One value and its place. `text` is a scalar as written; the place of a mapping's value is its key's."""

    value: Value
    where: str
    text: str = ""

    @property
    def kind(self) -> str:
        """The kind of the value, as text for an error."""
        names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
        return names.get(type(self.value), "a number")


def read_yaml_file(path: Path) -> Node:
    """The tree of a file; every error names the path as it was given."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        within = path / "run.yaml"
        hint = f"did you mean {within}?" if within.is_file() else "new files, in a folder of their own: diloco init DIR"
        raise UsageError(f"cannot read the file: {reason}", where=str(path), hint=hint) from None
    if len(raw) > MAX_FILE_BYTES:
        raise UsageError(f"the file is larger than {MAX_FILE_BYTES // 10**6} MB", where=str(path))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"the file is not UTF-8 text (byte {error.start})", where=str(path)) from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str, *, fixed_place: bool = False) -> Node:
    """The tree of `text`. `fixed_place`: every place is `source` itself (a flag has no lines)."""
    import yaml  # not above: `status` knows settings and reads no YAML, which would take longer to load than its look

    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("not UTF-8 text", where=source) from None
    try:
        return _Reader(text, source, fixed_place).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if fixed_place or mark is None else f":{mark.line + 1}"
        problem = str(error.problem or error.context)
        hint = "put the value in quotes" if "cannot start any token" in problem else None
        before = "" if mark is None else "".join(text.splitlines()[mark.line : mark.line + 1])[: mark.column + 1]
        if hint and "\t" in before and not before.strip():
            hint = "indent with spaces: YAML takes no tabs there"
        raise UsageError(f"not valid YAML: {problem}", where=f"{source}{line}", hint=hint) from None
    except yaml.YAMLError as error:
        first_line = str(error).splitlines()[0]
        raise UsageError(f"not valid YAML: {first_line}", where=source) from None


class _Reader:
    def __init__(self, text: str, source: str, fixed_place: bool) -> None:
        import yaml

        self.source = source
        self.fixed_place = fixed_place
        self.yaml: Any = yaml
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is there
        self.events: Iterator[Any] = yaml.parse(text, Loader=loader)

    def document(self) -> Node:
        next(self.events)  # the stream's start
        first = next(self.events)
        if isinstance(first, self.yaml.StreamEndEvent):
            raise UsageError(
                "the file is empty", where=self.source, hint="new files, in a folder of their own: diloco init DIR"
            )
        tree = self._node(next(self.events), depth=0)
        next(self.events)  # the document's end
        after = next(self.events)
        if not isinstance(after, self.yaml.StreamEndEvent):
            raise UsageError("a second document begins; write one document a file", where=self._where(after))
        return tree

    def _where(self, event: Any) -> str:
        return self.source if self.fixed_place else f"{self.source}:{event.start_mark.line + 1}"

    def _node(self, event: Any, depth: int) -> Node:
        where = self._where(event)
        if isinstance(event, self.yaml.AliasEvent) or event.anchor is not None:
            raise UsageError("anchors and aliases (&, *) are not allowed; write the value out", where=where)
        if event.tag is not None:
            raise UsageError(f"the tag {event.tag} is not allowed", where=where)
        if depth > DEEPEST_NESTING:
            raise UsageError(f"nested deeper than {DEEPEST_NESTING} levels", where=where)
        if isinstance(event, self.yaml.MappingStartEvent):
            return Node(self._mapping(depth), where)
        if isinstance(event, self.yaml.SequenceStartEvent):
            return Node(list(self._items(depth)), where)
        if len(event.value) > MAX_SCALAR:
            raise UsageError(f"a value is longer than {MAX_SCALAR} characters", where=where)
        plain = event.implicit[0]
        return Node(resolve_scalar(event.value) if plain else event.value, where, event.value)

    def _items(self, depth: int) -> Iterator[Node]:
        while not isinstance(event := next(self.events), self.yaml.SequenceEndEvent):
            yield self._node(event, depth + 1)

    def _mapping(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(event := next(self.events), self.yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            if isinstance(key.value, (dict, list)) or not key.text:
                raise UsageError("a key must be plain text", where=key.where)
            if key.text in entries:
                before = entries[key.text].where
                raise UsageError(f"the key '{key.text}' is given twice (before: {before})", where=key.where)
            value = self._node(next(self.events), depth + 1)
            entries[key.text] = Node(value.value, key.where, value.text)
        return entries


def resolve_scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    if text[0] not in NUMBERS_BEGIN_WITH:  # most words: no need to try every form of a number
        return text
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def shown(node: Node) -> str:
    """A value for an error: its text, or its kind."""
    if isinstance(node.value, (dict, list)) or node.value is None:
        return node.kind
    written = node.text if len(node.text) <= MAX_SHOWN else node.text[: MAX_SHOWN - 3] + "..."
    return f"'{written}'" if isinstance(node.value, str) else written


def refuse_other_file(tree: Node, wanted: Kind, path: Path) -> None:
    """Raises UsageError for a file that has keys of another kind alone."""
    keys = set(tree.value) if isinstance(tree.value, dict) else set()
    if keys & ONLY_IN[wanted]:
        return
    for kind, own in ONLY_IN.items():
        if kind != wanted and keys & own:
            hint = HINTS[kind, wanted].format(path=path, name=path.name)
            raise UsageError(f"this is {_one(kind)}, not {_one(wanted)}", where=str(path), hint=hint)


def _one(kind: Kind) -> str:
    return f"an {kind}" if kind == "inventory" else f"a {kind}"


def refuse_newer(tree: Node, version: int) -> None:
    """Refuse a file of a newer format, before any of its keys is read."""
    found = tree.value.get("version") if isinstance(tree.value, dict) else None
    if found is None or found.value == version:
        return
    if not isinstance(found.value, int) or isinstance(found.value, bool) or found.value < 1:
        raise UsageError(f"version: must be {version}, not {shown(found)}", where=found.where)
    raise UsageError(
        f"version: {found.value} is newer than this diloco reads ({version})",
        where=found.where,
        hint="pip install --upgrade diloco",
    )
