"""Settings of a run from outside its file: the environment above it, the user's own file below.

--set > DILOCO_TRAIN_TOKENS > run.yaml > ~/.config/diloco/config.yaml > default. A variable is the key in capitals, with
`_` for each dot: DILOCO_SYNC_GRACE_GAMMA is sync.grace.gamma. The user's file has the sections of run.yaml that are no
single run's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from diloco_cli.config.build import Builder, Rules
from diloco_cli.config.readers import shown
from diloco_cli.config.settings import RunSettings
from diloco_cli.config.yaml_tree import Node, parse_yaml, read_yaml_file
from diloco_cli.environment import environment_with_prefix
from diloco_cli.errors import UsageError, suggestion
from diloco_cli.paths import user_file

PREFIX = "DILOCO_"
OF_ONE_RUN = frozenset({"name", "version", "inventory", "model", "data"})
SECTIONS = tuple(
    field.name for field in dataclasses.fields(RunSettings) if field.name not in OF_ONE_RUN | {"consented"}
)


def put_environment(tree: Node, rules: Rules) -> None:
    """Every DILOCO_<SECTION>_<KEY> into the tree. Raises UsageError if the section has no such key; other variables of
    this prefix are no settings of a run."""
    known = {PREFIX + path.upper().replace(".", "_"): path for path in keys_of(RunSettings, rules)}
    sections = tuple(f"{PREFIX}{name.upper()}_" for name in (*SECTIONS, "model", "data"))
    for variable, value in sorted(environment_with_prefix(PREFIX).items()):
        if variable in known:
            put(tree, known[variable].split("."), parse_yaml(value, variable, fixed_place=True), variable)
        elif variable.startswith(sections):
            near = suggestion(variable, known)
            raise UsageError(
                f"no key of a run file has this name{near}", where=variable, hint="unset it, or correct it"
            )


def keys_of(cls: type, rules: Rules, path: str = "") -> Iterator[str]:
    """`train.inner.lr` and all others, as a file names them. Keys at the top are of one run alone."""
    for key, hint in Builder(rules).keys(cls):
        place = f"{path}{key}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from keys_of(hint, rules, f"{place}.")
        elif path:
            yield place


def put(tree: Node, keys: list[str], value: Node, place: str) -> None:
    """One value into the tree, with the mappings that lead to it."""
    node = tree
    for key in keys[:-1]:
        if not isinstance(node.value, dict):
            raise UsageError(f"'{key}' lies inside a value that is no mapping", where=place)
        node = node.value.setdefault(key, Node({}, place))
    if not isinstance(node.value, dict):
        raise UsageError(f"'{keys[-1]}' lies inside a value that is no mapping", where=place)
    node.value[keys[-1]] = value


def read_user_file() -> dict[str, Node]:
    """The sections of the user's own file; none if there is no such file."""
    path = user_file()
    if not path.is_file():
        return {}
    tree = read_yaml_file(path)
    if not isinstance(tree.value, dict):
        raise UsageError(f"the file must be a mapping of keys, not {shown(tree)}", where=tree.where)
    for key, child in tree.value.items():
        if key not in SECTIONS:
            whose = "belongs to one run, not to all" if key in OF_ONE_RUN else "is unknown"
            raise UsageError(
                f"the key '{key}' {whose}{suggestion(key, SECTIONS)}; allowed: {', '.join(SECTIONS)}", where=child.where
            )
    return tree.value


def put_below(tree: Node, defaults: dict[str, Node]) -> None:
    """What the tree does not say itself."""
    if not isinstance(tree.value, dict):
        return
    for key, value in defaults.items():
        if key not in tree.value:
            tree.value[key] = value
        elif isinstance(value.value, dict):
            put_below(tree.value[key], value.value)
