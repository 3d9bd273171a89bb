"""`--set a.b=value`: one value of a file, changed from the command line."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_cli.config.yaml_tree import Node, parse_yaml
from diloco_cli.errors import UsageError

FORM = "write --set key.key=value, for example --set sync.every=40"


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
        raise UsageError(f"cannot be read; {FORM}", where=place)
    node = tree
    for key in keys[:-1]:
        if not isinstance(node.value, dict):
            raise UsageError(f"'{key}' lies inside a value that is no mapping", where=place)
        node = node.value.setdefault(key, Node({}, place))
    if not isinstance(node.value, dict):
        raise UsageError(f"'{keys[-1]}' lies inside a value that is no mapping", where=place)
    node.value[keys[-1]] = parse_yaml(text, place, fixed_place=True)
