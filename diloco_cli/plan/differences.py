"""How two plans differ: `+` what came, `-` what went, `~` what changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from diloco_cli.config.codec import to_plain
from diloco_cli.plan.plan import Plan

CAUSES = ("goal", "run", "inventory", "model", "settings", "formed")  # the rest follows from them
SAYINGS = ("why", "warnings", "assumptions", "alternatives", "sensitivity")  # follow from what else is different


def plan_differences(old: Plan, new: Plan) -> list[str]:
    """Lines such as `~ islands.home.local_steps: 33 -> 38`, `+ islands.tokyo`, `- islands.home`; causes first."""
    before, after = (_ordered(to_plain(plan)) for plan in (old, new))
    return list(_differences(before, after, ""))


def summary_of(changes: list[str]) -> str:
    """`2 to add, 40 to change, 1 to remove`."""
    count = {sign: sum(line.startswith(sign) for line in changes) for sign in "+~-"}
    return f"{count['+']} to add, {count['~']} to change, {count['-']} to remove"


def _ordered(plain: dict[str, Any]) -> dict[str, Any]:
    names = [*CAUSES, *(name for name in plain if name not in (*CAUSES, *SAYINGS))]
    return {name: plain[name] for name in names}


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if old == new:
        return
    before, after = _children(old), _children(new)
    if before is None or after is None:
        yield f"~ {path}: {_shown(old)} -> {_shown(new)}"
        return
    for key in [*before, *(key for key in after if key not in before)]:
        place = f"{path}.{key}" if path else key
        if key not in after:
            yield f"- {place}{_said(before[key])}"
        elif key not in before:
            yield f"+ {place}{_said(after[key])}"
        else:
            yield from _differences(before[key], after[key], place)


def _children(value: Any) -> dict[str, Any] | None:
    """A mapping's entries, or a list's by their names; None for a leaf."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: item for item in value}
    return None


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def _said(item: Any) -> str:
    """A reason that came or went with an entry, or a value that did."""
    if isinstance(item, dict):
        return f": {item['reason']}" if isinstance(item.get("reason"), str) else ""
    return f": {_shown(item)}"
