"""A plan as a file: versioned JSON that `launch` reads back exactly; and how two plans differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco_cli.config.codec import from_plain, to_plain
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.plan.plan import Plan

PLAN_FORMAT = "diloco-plan"
PLAN_VERSION = 1
LARGEST_PLAN_BYTES = 64_000_000
SETTINGS = ("run", "inventory", "model")  # what a plan was made from; `--json` shows what came out


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The `data` of `diloco plan --json`."""
    plain = to_plain(plan)
    return {key: value for key, value in plain.items() if key not in SETTINGS}


def plan_to_text(plan: Plan) -> str:
    body = {"format": PLAN_FORMAT, "version": PLAN_VERSION, "plan": to_plain(plan)}
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def plan_from_text(text: str, where: str) -> Plan:
    """Raises UsageError for anything but a plan of this version or an older one."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("not a plan file (no JSON)", where=where, hint="diloco plan INVENTORY -o PLAN") from None
    if not isinstance(body, dict) or body.get("format") != PLAN_FORMAT:
        raise UsageError("not a plan file", where=where, hint="diloco plan INVENTORY -o PLAN")
    version = body.get("version")
    if not isinstance(version, int) or version < 1:
        raise UsageError(f"the plan's version is {version!r}, not a number from 1 to {PLAN_VERSION}", where=where)
    if version > PLAN_VERSION:
        raise UsageError(
            f"the plan is of version {version}, newer than this diloco reads ({PLAN_VERSION})",
            where=where,
            hint="pip install --upgrade diloco, or make the plan again: diloco plan INVENTORY -o PLAN",
        )
    try:
        return from_plain(Plan, body.get("plan"))
    except UsageError as error:
        raise UsageError(error.message, where=where, hint="diloco plan INVENTORY -o PLAN") from None


def save_plan(plan: Plan, path: Path | str) -> None:
    """Whole or not at all: a temporary file beside it takes its place."""
    path = Path(path)
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(plan_to_text(plan), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write the plan: {reason}", where=str(path)) from None


def load_plan(path: Path | str) -> Plan:
    """Raises NotFoundError if there is no such file, UsageError if it holds no plan of a known version."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(LARGEST_PLAN_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError("no such plan", where=str(path), hint=f"diloco plan INVENTORY -o {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read the plan: {(error.strerror or '').lower()}", where=str(path)) from None
    if len(raw) > LARGEST_PLAN_BYTES:
        raise UsageError(f"larger than {LARGEST_PLAN_BYTES // 10**6} MB", where=str(path))
    return plan_from_text(raw.decode("utf-8", errors="replace"), str(path))


def plan_differences(old: Plan, new: Plan) -> list[str]:
    """Lines such as `~ islands.home.local_steps: 33 -> 38`, `+ islands.tokyo`, `- islands.home`."""
    return list(_differences(to_plain(old), to_plain(new), ""))


def _differences(old: Any, new: Any, path: str) -> list[str]:
    if old == new:
        return []
    before, after = _children(old), _children(new)
    if before is None or after is None:
        return [f"~ {path}: {json.dumps(old)} -> {json.dumps(new)}"]
    lines = []
    for key in [*before, *(key for key in after if key not in before)]:
        place = f"{path}.{key}" if path else key
        if key not in after:
            lines.append(f"- {place}")
        elif key not in before:
            lines.append(f"+ {place}")
        else:
            lines += _differences(before[key], after[key], place)
    return lines


def _children(value: Any) -> dict[str, Any] | None:
    """A mapping's entries, or a list's by their names; None for a leaf."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: item for item in value}
    return None
