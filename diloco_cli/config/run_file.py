"""run.yaml -> RunSettings, with the layers above and below the file.

--set > DILOCO_TRAIN_TOKENS > run.yaml > ~/.config/diloco/config.yaml > default. A variable is the key in capitals, with
`_` for each dot: DILOCO_SYNC_GRACE_GAMMA is sync.grace.gamma. The user's file has the sections of run.yaml that are no
single run's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from diloco_cli.config.codec import replace
from diloco_cli.config.fields import Origins, SettingsReader, fields_of, keys_of, text
from diloco_cli.config.huggingface import is_hub_name
from diloco_cli.config.settings import RunSettings
from diloco_cli.config.validation import check_data, check_model, refuse_impossible
from diloco_cli.config.yaml_tree import Node, parse_yaml, read_yaml_file, refuse_newer, refuse_other_file, shown
from diloco_cli.environment import environment_value, environment_with_prefix
from diloco_cli.errors import UsageError, suggestion
from diloco_cli.paths import user_file
from diloco_cli.store.url import is_url, normalise_store_url

RUN_VERSION = 1
PREFIX = "DILOCO_"
OF_THE_USER = ("on_event", "webhook")
OF_ONE_RUN = frozenset({"name", "version", "inventory", "model", "data"})
SECTIONS = tuple(key for key in fields_of(RunSettings) if key not in OF_ONE_RUN)


def load_run(path: Path | str, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings of a run file, with `a.b=value` overrides from --set."""
    return load_run_with_origins(path, overrides)[0]


def load_run_with_origins(
    path: Path | str, overrides: Iterable[str] = (), only_file: bool = False
) -> tuple[RunSettings, Origins]:
    """The settings, and for each key that was given its place: {"sync.every": "run.yaml:12"}. `only_file`: without
    the user's own file and the environment."""
    tree = read_yaml_file(Path(path))
    refuse_other_file(tree, "run file", Path(path))
    refuse_user_keys(tree, "run file")
    if not only_file and isinstance(tree.value, dict):
        put_below(tree, {key: node for key, node in read_user_file().items() if key not in OF_THE_USER})
        put_environment(tree)
    apply_overrides(tree, overrides)
    refuse_newer(tree, RUN_VERSION)
    reader = SettingsReader(Path(path).parent)
    run = _placed(reader.read(RunSettings, tree), reader.folder, reader.origins)
    check_model(run.model, _place(tree, "model"))
    check_data(run, _place(tree, "data"))
    refuse_impossible(run, reader.origins, tree.where)
    return run, reader.origins


def apply_overrides(tree: Node, overrides: Iterable[str]) -> Node:
    """The tree with every override put in, in order; names are checked later, as those of the file are."""
    if not isinstance(tree.value, dict):
        raise UsageError("the file must be a mapping of keys", where=tree.where)
    for override in overrides:
        _apply(tree, override)
    return tree


def _apply(tree: Node, override: str) -> None:
    place = f"--set {override}"
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not text.strip() or not all(keys):
        raise UsageError("cannot be read; write --set key.key=value, for example --set sync.every=40", where=place)
    put(tree, keys, parse_yaml(text, place, fixed_place=True), place)


def inventory_path_of(run: RunSettings, run_path: Path | str) -> Path | None:
    """Where the run file's inventory lies: relative to the run file. None if it names none."""
    return None if run.inventory is None else Path(run_path).parent / run.inventory


def _placed(run: RunSettings, folder: Path, origins: Origins) -> RunSettings:
    """The run with absolute places of its data: a relative path is beside the run file, in `folder`."""
    data = run.data
    try:
        tokens = normalise_store_url(data.tokens, folder) if data.tokens else None
    except UsageError as error:
        raise UsageError(f"data.tokens: {error.message}", where=origins.get("data.tokens"), hint=error.hint) from None
    texts = _local(data.text, "text", folder, origins)
    tokenizer = data.tokenizer
    if tokenizer is None or not is_hub_name(tokenizer) or os.path.isdir(_absolute(tokenizer, folder)):
        tokenizer = _local(tokenizer, "tokenizer", folder, origins)
    return replace(run, data=replace(data, tokens=tokens, text=texts, tokenizer=tokenizer))


def _local(path: str | None, key: str, folder: Path, origins: Origins) -> str | None:
    """An absolute path or pattern on this machine."""
    if path is not None and is_url(path):
        raise UsageError(
            f"data.{key}: must be a path on this machine, not a URL",
            where=origins.get(f"data.{key}"),
            hint="diloco data tokenize FILES -o gs://BUCKET/PREFIX, then data: {tokens: gs://BUCKET/PREFIX}",
        )
    return None if path is None else _absolute(path, folder)


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder.absolute() / Path(path).expanduser())


def _place(tree: Node, key: str) -> str:
    child = tree.value.get(key) if isinstance(tree.value, dict) else None
    return child.where if child is not None else tree.where


def put_environment(tree: Node) -> None:
    """Every DILOCO_<SECTION>_<KEY> into the tree. Raises UsageError if the section has no such key; other variables of
    this prefix are no settings of a run."""
    known = {PREFIX + path.upper().replace(".", "_"): path for path in variables()}
    sections = tuple(f"{PREFIX}{name.upper()}_" for name in (*SECTIONS, "model", "data"))
    for variable, value in sorted(environment_with_prefix(PREFIX).items()):
        if variable in known:
            put(tree, known[variable].split("."), parse_yaml(value, variable, fixed_place=True), variable)
        elif variable.startswith(sections):
            near = suggestion(variable, known)
            raise UsageError(
                f"no key of a run file has this name{near}", where=variable, hint="unset it, or correct it"
            )


def variables() -> list[str]:
    """The settings that have a variable: all but those at the top, which are of one run alone."""
    return [path for path, _ in keys_of(RunSettings) if "." in path]


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
