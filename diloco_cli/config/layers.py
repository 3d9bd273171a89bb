"""Settings of a run from outside its file: the environment above it, the user's own file below.

--set > DILOCO_TRAIN_TOKENS > run.yaml > ~/.config/diloco/config.yaml > default. A variable is the key in capitals, with
`_` for each dot: DILOCO_SYNC_GRACE_GAMMA is sync.grace.gamma. The user's file has the sections of run.yaml that are no
single run's."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from diloco_cli.config.build import Builder, Rules
from diloco_cli.config.readers import shown, text
from diloco_cli.config.settings import RunSettings
from diloco_cli.config.yaml_tree import Node, parse_yaml, read_yaml_file
from diloco_cli.environment import environment_value, environment_with_prefix
from diloco_cli.errors import UsageError, suggestion
from diloco_cli.paths import user_file

PREFIX = "DILOCO_"
OF_THE_USER = ("on_event", "webhook")
OF_ONE_RUN = frozenset({"name", "version", "inventory", "model", "data"})
SECTIONS = tuple(name for name in RunSettings.__struct_fields__ if name not in OF_ONE_RUN)


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
        if isinstance(hint, type) and issubclass(hint, Struct):
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
    path, allowed = user_file(), SECTIONS + OF_THE_USER
    if not path.is_file():
        return {}
    tree = read_yaml_file(path)
    if not isinstance(tree.value, dict):
        raise UsageError(f"the file must be a mapping of keys, not {shown(tree)}", where=tree.where)
    for key, child in tree.value.items():
        if key not in allowed:
            whose = "belongs to one run, not to all" if key in OF_ONE_RUN else "is unknown"
            raise UsageError(
                f"the key '{key}' {whose}{suggestion(key, allowed)}; allowed: {', '.join(allowed)}", where=child.where
            )
    return tree.value


def read_user_text(name: str) -> tuple[str, str]:
    """(the text of a key of OF_THE_USER, its place): from its variable, else from the user's own file, else ""."""
    variable = f"{PREFIX}{name.upper()}"
    told = environment_value(variable)
    if told is not None:
        return told, variable
    node = read_user_file().get(name)
    return ("", "") if node is None else (text(node), node.where)


def refuse_user_keys(tree: Node, what: str) -> None:
    """Raises UsageError if a file of the run has a key that is the user's own: who may write the file, or the bucket
    that it goes to, must not choose what runs on this machine."""
    for key in OF_THE_USER:
        if isinstance(tree.value, dict) and key in tree.value:
            raise UsageError(
                f"the key '{key}' does not belong into a {what}: it names what this machine runs or calls",
                where=tree.value[key].where,
                hint=f"put it into {user_file()}, or give --{key.replace('_', '-')} to launch or resume",
            )


def put_below(tree: Node, defaults: dict[str, Node]) -> None:
    """What the tree does not say itself."""
    if not isinstance(tree.value, dict):
        return
    for key, value in defaults.items():
        if key not in tree.value:
            tree.value[key] = value
        elif isinstance(value.value, dict):
            put_below(tree.value[key], value.value)
