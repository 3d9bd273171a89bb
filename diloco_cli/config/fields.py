"""From YAML to settings: text -> a tree of nodes with their file and line -> typed, checked values.

The tree is stricter than YAML. It is built from parser events, so no object is ever constructed from a tag. Refused:
duplicate keys, anchors, aliases, tags, several documents, keys that are no plain text, deep nesting, large files.
Scalars follow YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema): `1e-4` is a number, `no` a word.

A setting is one line: `every: Annotated[Count, doc("H: steps between two exchanges of a fragment")] = 24`. The type
has its kind, bounds and unit; `doc` says what it means. Readers, JSON Schemas and templates/run.yaml are made of these
lines. A key of a file is the field's name without the unit: `skip_after: 60 s` is `skip_after_s`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, structs

from diloco_cli.digests import DIGEST
from diloco_cli.errors import UsageError, suggestion
from diloco_cli.quantities import parse_bandwidth, parse_count, parse_duration, parse_egress, parse_price, parse_size

MAX_FILE_BYTES = 8_000_000
AUTO = "auto"
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
    ("run file", "inventory"): "diloco plan {path}, which takes the inventory that this run file names",
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
    kinds = kinds_of(tree)
    if kinds and wanted not in kinds:
        hint = HINTS[kinds[0], wanted].format(path=path, name=path.name)
        raise UsageError(f"this is {_one(kinds[0])}, not {_one(wanted)}", where=str(path), hint=hint)


def kinds_of(tree: Node) -> list[Kind]:
    """The kinds of file that have keys of this one; several for a mixture."""
    keys = set(tree.value) if isinstance(tree.value, dict) else set()
    return [kind for kind, own in ONLY_IN.items() if keys & own]


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
        hint="take a newer diloco from where this one came; this one: diloco --version",
    )


T = TypeVar("T", bound="Settings")
Origins = dict[str, str]
"""The place where each setting was given: {"sync.every": "run.yaml:12"}."""
Read = Callable[[Node, Path], Any]
"""Reads a value with a form of its own; the path is the folder of the file. Raises UsageError."""

MAX_REMEMBERED = 4096  # quantities: a list of a thousand machines writes the same few
NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
NAME_RULE = "lower-case letters, digits and '-', at most 63, beginning with a letter or digit"
KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
    tuple: "a list of text",
}


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all settings: immutable values; unknown keys are errors."""

    HINT: ClassVar[str | None] = None  # what to say of an unknown key
    AUTO: ClassVar[tuple[str, ...]] = ()  # the keys that are `auto` where that word stands in place of them all


@dataclass(frozen=True)
class Quantity:
    """How a quantity is written, and the suffix that a field's name has for it."""

    parse: Callable[[str], float]
    suffix: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parse", lru_cache(maxsize=MAX_REMEMBERED)(self.parse))


def doc(text: str) -> Meta:
    """What a setting means: in its JSON Schema, and as the comment in templates/run.yaml."""
    return Meta(description=text)


def unit(parse: Callable[[str], float], suffix: str = "", **bounds: float) -> Meta:
    """A quantity with a unit."""
    bounded: Any = Meta  # whose overloads know no ** of numbers
    return cast("Meta", bounded(extra={"unit": Quantity(parse, suffix)}, **bounds))


def form(read: Read, schema: Mapping[str, Any], key: str | None = None) -> Meta:
    """A value with a form of its own, which `read` reads; `schema`: of what may be written; `key`: in the file."""
    return Meta(extra={"read": read, "schema": schema, "key": key})


def one_of(names: Iterable[str]) -> Meta:
    """One of the names of a table."""
    words = tuple(names)
    pattern = "^(" + "|".join(map(re.escape, words)) + ")$"
    return Meta(pattern=pattern, extra={"words": words, "schema": {"enum": list(words)}})


def matching(pattern: str, what: str, written: str | list[str] = "string") -> Meta:
    """Text of a pattern; `what`: the pattern in words."""
    return Meta(pattern=pattern, extra={"what": what, "schema": {"type": written, "pattern": pattern}})


Whole = Annotated[int, Meta(ge=1)]
Count = Annotated[int, unit(parse_count, ge=1)]
CountOrNone = Annotated[int, unit(parse_count, ge=0)]
Size = Annotated[int, unit(parse_size, "_bytes", ge=1)]
Duration = Annotated[float, unit(parse_duration, "_s", ge=0)]
LongDuration = Annotated[float, unit(parse_duration, "_s", gt=0)]
Bandwidth = Annotated[float, unit(parse_bandwidth, "_bps", gt=0)]
Price = Annotated[float, unit(parse_price, "_per_h", ge=0)]
Egress = Annotated[float, unit(parse_egress, "_per_gb", ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Text = Annotated[str, matching(r"\S", "text")]
Name = Annotated[str, matching(NAME, f"a name ({NAME_RULE})", ["string", "integer"])]
Entrypoint = Annotated[str, matching(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", "package.module:function")]
Digest = Annotated[str, matching(f"^{DIGEST.pattern}$", f"a digest, {DIGEST.pattern}")]


@dataclass(frozen=True)
class Field:
    """One setting, as its line declares it. `kind`: its type without bounds, None and words; `words`: those that may
    stand for a value, as `auto`."""

    name: str
    hint: Any
    kind: Any
    required: bool
    default: Any
    optional: bool
    words: tuple[str, ...]
    meta: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The field's name in a file."""
        unit: Quantity | None = self.meta.get("unit")
        return self.meta.get("key") or (self.name.removesuffix(unit.suffix) if unit else self.name)

    @property
    def item(self) -> type[Settings] | None:
        """The type of settings that it is, or has many of."""
        kind = self.kind if get_origin(self.kind) is None else get_args(self.kind)[-1]
        kind = get_args(self.kind)[0] if get_origin(self.kind) is tuple else kind
        is_nested = isinstance(kind, type) and issubclass(kind, Settings) and "read" not in self.meta
        return cast("type[Settings]", kind) if is_nested else None

    def read(self, node: Node, folder: Path) -> Any:
        """The value. Raises UsageError that says what is allowed."""
        if node.value in self.words and isinstance(node.value, str):
            return node.value
        try:
            return self._value(node, folder)
        except UsageError as error:
            also = f"; '{self.words[0]}' is allowed too" if self.words and self.kind is not None else ""
            raise UsageError(f"{error.message}{also}", where=error.where, hint=error.hint) from None

    def _value(self, node: Node, folder: Path) -> Any:
        written = self.meta["read"](node, folder) if "read" in self.meta else self._written(node)
        try:
            return msgspec.convert(written, self.hint)
        except msgspec.ValidationError:
            near = suggestion(node.text, self.meta.get("words", self.words))
            problem = f"must be {self._allowed(written)}, not {shown(node)}{near}"
            raise UsageError(problem, where=node.where) from None

    def _written(self, node: Node) -> Any:
        """The value of the node, before its type and its bounds are checked."""
        unit: Quantity | None = self.meta.get("unit")
        if unit is not None:
            if isinstance(node.value, (dict, list, bool, type(None))):
                raise UsageError(f"must be a quantity with a unit, not {shown(node)}", where=node.where)
            try:
                return unit.parse(node.text)
            except UsageError as error:
                raise UsageError(error.message, where=node.where) from None
        if isinstance(node.value, int) and "integer" in self.meta.get("schema", {}).get("type", ""):
            return node.text  # a name such as 7 is the word that it looks like
        return plain(node)

    def _allowed(self, written: Any) -> str:
        """What is allowed, in words: the kind if that is wrong, else the bounds."""
        if "what" in self.meta:
            return str(self.meta["what"])
        words = self.meta.get("words", self.words if self.kind is None else ())
        if words:
            return f"one of {', '.join(words)}"
        try:
            msgspec.convert(written, self.kind)
        except msgspec.ValidationError:
            return KINDS[get_origin(self.kind) or self.kind]
        return bounds_in_words(self.meta)

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of what a file may say."""
        if self.item is not None:
            found = self._nested_schema(self.item)
        elif "schema" in self.meta:
            found = dict(self.meta["schema"])
        elif "unit" in self.meta:
            found = {"type": ["string", "number"]}
        elif self.kind is None:
            found = {"enum": list(self.words)}
        else:
            bounds = {key: self.meta[key] for key in ("ge", "gt", "le", "lt") if key in self.meta}
            found = msgspec.json.schema(Annotated[self.kind, Meta(**bounds)])
        if self.words and self.kind is not None:
            found = {"anyOf": [found, {"enum": list(self.words)}]}
        if self.optional:
            found = {"anyOf": [found, {"type": "null"}]}
        return found | ({"description": self.meta["description"]} if "description" in self.meta else {})

    def _nested_schema(self, item: type[Settings]) -> dict[str, Any]:
        found, origin = schema_of(item), get_origin(self.kind)
        if origin is tuple:
            return {"type": "array", "items": found}
        if origin is not dict:
            return found
        found["properties"].pop("name", None)
        found["required"] = [key for key in found["required"] if key != "name"]
        return {"type": "object", "additionalProperties": {"anyOf": [found, {"type": "null"}]}}


def bounds_in_words(bounds: Mapping[str, Any]) -> str:
    ge, gt, le, lt = (bounds.get(key) for key in ("ge", "gt", "le", "lt"))
    if ge is not None and le is not None:
        return f"from {ge:g} to {le:g}"
    low = f"at least {ge:g}" if ge is not None else f"above {gt:g}"
    high = f" and below {lt:g}" if lt is not None else f" and at most {le:g}" if le is not None else ""
    return low + high


@cache
def fields_of(cls: type[Settings]) -> dict[str, Field]:
    """The settings of a class by their keys in a file, in their order."""
    hints = get_type_hints(cls, include_extras=True)
    found = [_field(each, hints[each.name]) for each in structs.fields(cls)]
    return {each.key: each for each in found}


def _field(info: structs.FieldInfo, hint: Any) -> Field:
    meta: dict[str, Any] = {}
    words: tuple[str, ...] = ()
    optional, kind = False, None
    for member in _members(hint, meta):
        if get_origin(member) is Literal:
            words += get_args(member)
        elif member is type(None):
            optional = True
        else:
            kind = member
    return Field(info.name, hint, kind, info.required, info.default, optional, words, meta)


def _members(hint: Any, meta: dict[str, Any]) -> Iterator[Any]:
    """The types that a value may have, without what is said of them, which goes into `meta`."""
    if get_origin(hint) is Annotated:
        for said in hint.__metadata__:
            named = {key: getattr(said, key) for key in ("ge", "gt", "le", "lt", "description")}
            meta.update({key: value for key, value in named.items() if value is not None} | (said.extra or {}))
        hint = hint.__origin__
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member, meta)
    else:
        yield hint


@dataclass
class SettingsReader:
    """Reads settings from a tree and remembers where each was given. `folder`: that of the file."""

    folder: Path
    origins: Origins = field(default_factory=dict)

    def read(self, cls: type[T], node: Node, path: str = "") -> T:
        """One mapping. Unknown and missing keys are errors; a missing key with a default keeps it."""
        at, known = f"{path}: " if path else "", fields_of(cls)
        if cls.AUTO and node.value == AUTO:
            node = Node(dict.fromkeys(cls.AUTO, node), node.where)
        if not isinstance(node.value, dict):
            also = f"; '{AUTO}' is allowed too" if cls.AUTO else ""
            raise UsageError(f"{at}must be a mapping, not {shown(node)}{also}", where=node.where)
        for key, child in node.value.items():
            if key not in known:
                allowed = f"{suggestion(key, known)}; allowed: {', '.join(known)}"
                raise UsageError(f"{at}unknown key '{key}'{allowed}", where=child.where, hint=cls.HINT)
        written = [(known[key], child) for key, child in node.value.items()]
        values = {each.name: self._value(each, child, _join(path, each.key)) for each, child in written}
        for key, each in known.items():
            if each.required and key not in node.value:
                raise UsageError(f"{at}the key '{key}' is missing", where=node.where)
        return cls(**values)

    def _value(self, field: Field, node: Node, path: str) -> Any:
        if node.value is None and field.optional:
            return None
        if field.item is not None:
            return self._nested(field.item, get_origin(field.kind), node, path)
        self.origins[path] = node.where
        try:
            return field.read(node, self.folder)
        except UsageError as error:
            raise UsageError(f"{path}: {error.message}", where=error.where, hint=error.hint) from None

    def _nested(self, cls: type[T], many: Any, node: Node, path: str) -> T | tuple[T, ...] | dict[str, T]:
        """Settings, a list of them, or a mapping of names to them; a class with a field `name` gets the key as name."""
        if many is tuple:
            if not isinstance(node.value, list):
                raise UsageError(f"{path}: must be a list, not {shown(node)}", where=node.where)
            return tuple(self.read(cls, child, _item(path, index, child)) for index, child in enumerate(node.value))
        if many is None:
            return self.read(cls, node, path)
        if not isinstance(node.value, dict):
            raise UsageError(f"{path}: must be a mapping of names, not {shown(node)}", where=node.where)
        return {key: self.read(cls, _with_name(cls, key, child), _join(path, key)) for key, child in node.value.items()}


def _with_name(cls: type[Settings], key: str, node: Node) -> Node:
    if "name" not in fields_of(cls) or not isinstance(node.value, dict):
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


def schema_of(cls: type[Settings]) -> dict[str, Any]:
    """The JSON Schema of a file of these settings."""
    known = fields_of(cls)
    found: dict[str, Any] = {
        "type": "object",
        "properties": {key: each.schema() for key, each in known.items()},
        "required": [key for key, each in known.items() if each.required],
        "additionalProperties": False,
    }
    return {"anyOf": [found, {"enum": [AUTO]}]} if cls.AUTO else found


def keys_of(cls: type[Settings], path: str = "") -> Iterator[tuple[str, Field]]:
    """`train.inner.lr` and all others, as a file names them."""
    for key, each in fields_of(cls).items():
        if each.item is not None and get_origin(each.kind) is None:
            yield from keys_of(each.item, _join(path, key))
        else:
            yield _join(path, key), each


def origin_of(origins: Mapping[str, str], key: str) -> str:
    """The place of a setting, or of the mapping that it was given in; `default` if it was not given."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key, "default")


def values_of(settings: Settings, path: str = "") -> Iterator[tuple[str, Any]]:
    """(key as in the file, value as plain data) of every setting, in their order."""
    for key, each in fields_of(type(settings)).items():
        value = getattr(settings, each.name)
        if isinstance(value, Settings):
            yield from values_of(value, _join(path, key))
        else:
            yield _join(path, key), msgspec.to_builtins(value)


def plain(node: Node) -> Any:
    """The node as plain data. Raises UsageError for a number that is not finite."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    if isinstance(node.value, float) and not math.isfinite(node.value):
        raise UsageError(f"must be a finite number, not {shown(node)}", where=node.where)
    return node.value


def text(node: Node) -> str:
    """A word or a quoted text. A bare number or `true` is refused: it must be quoted to be a text."""
    if not isinstance(node.value, str) or not node.value.strip():
        raise UsageError(f"must be text, not {shown(node)}", where=node.where)
    return node.value
