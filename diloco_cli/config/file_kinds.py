"""Tells run files, inventories and plans apart, where one was given in another's place."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from diloco_cli.config.yaml_tree import Node
from diloco_cli.errors import UsageError

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
