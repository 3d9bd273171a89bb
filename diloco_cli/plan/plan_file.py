"""A plan as a file: versioned JSON that `launch` reads back exactly, with a digest that shows any change; and how two
plans differ.

The digest is over the plan's canonical JSON (keys sorted, no spaces). The same hardware, run and version of diloco
give the same bytes, so the digest is also the plan's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco_cli.config.codec import from_plain, parse_object, to_plain
from diloco_cli.digests import digest
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.plan.plan import Plan

PLAN_FORMAT = "diloco-plan"
PLAN_VERSION = 3
MAX_PLAN_BYTES = 64_000_000
SETTINGS = ("run", "inventory", "model")  # a plan's inputs, which `--json` leaves out
NAME_DIGITS = 12  # of the digest in a file's name
AGAIN = "make the plan again: diloco plan INVENTORY -o PLAN"
CAUSES = ("goal", "run", "inventory", "model", "settings", "formed")  # of differences; the rest follows from them
SAYINGS = ("why", "warnings", "assumptions", "alternatives", "sensitivity")  # follow from what else is different


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The `data` of `diloco plan --json`."""
    plain = to_plain(plan)
    return {key: value for key, value in plain.items() if key not in SETTINGS} | {"digest": plan_digest(plan)}


def plan_digest(plan: Plan) -> str:
    """`algorithm-hex` of the plan and its inputs."""
    return _digest_of(to_plain(plan))


def _digest_of(plain: Any) -> str:
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest(canonical.encode())


def plan_file_name(plan: Plan) -> str:
    """`NAME-0123456789ab.plan.json`: the run's name and the digest."""
    return f"{plan.run.name}-{plan_digest(plan).partition('-')[2][:NAME_DIGITS]}.plan.json"


def plan_to_text(plan: Plan, sources: Any = None) -> str:
    """`sources`: what the plan was made from, kept beside it and not in its digest."""
    plain = to_plain(plan)
    body = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "digest": _digest_of(plain),
        "sources": sources,
        "plan": plain,
    }
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def plan_from_text(text: str, where: str) -> Plan:
    """Raises UsageError for anything but an unchanged plan of this version."""
    try:
        body = parse_object(text, MAX_PLAN_BYTES)
    except ValueError as error:
        problem = f"not a plan file (no JSON: {error})"
        raise UsageError(problem, where=where, hint="diloco plan INVENTORY -o PLAN") from None
    if body.get("format") != PLAN_FORMAT:
        raise UsageError("not a plan file", where=where, hint="diloco plan INVENTORY -o PLAN")
    _check_version(body.get("version"), where)
    _check_digest(body, where)
    try:
        return from_plain(Plan, body.get("plan"))
    except (UsageError, ValueError, OverflowError) as error:
        raise UsageError(getattr(error, "message", str(error)), where=where, hint=AGAIN) from None


def _check_version(version: Any, where: str) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"the plan's version is {version!r}, not {PLAN_VERSION}", where=where)
    if version > PLAN_VERSION:
        raise UsageError(
            f"the plan is of version {version}, newer than this diloco reads ({PLAN_VERSION})",
            where=where,
            hint=f"pip install --upgrade diloco, or {AGAIN}",
        )
    if version < PLAN_VERSION:
        raise UsageError(
            f"the plan is of version {version}, and this diloco reads {PLAN_VERSION}: its numbers mean something else",
            where=where,
            hint=AGAIN,
        )


def _check_digest(body: dict[str, Any], where: str) -> None:
    """Checks the digest in the file, and that in the file's name, if it has one."""
    found = _digest_of(body.get("plan"))
    if body.get("digest") != found:
        raise UsageError(
            "the plan was changed after it was made: its content is not what its digest says",
            where=where,
            hint=f"change the run file or the inventory, and {AGAIN}",
        )
    named = re.search(rf"-([0-9a-f]{{{NAME_DIGITS}}})\.plan\.json$", where)
    if named is not None and not found.partition("-")[2].startswith(named[1]):
        raise UsageError(
            f"the file's name says {named[1]}, its content is {found.partition('-')[2][:NAME_DIGITS]}",
            where=where,
            hint="another plan took this file's place; rename it if it is the one you mean",
        )


def save_plan(plan: Plan, path: Path | str, sources: Any = None) -> Path:
    """Write the file atomically, by renaming a temporary file. `path` may be a folder: then under the plan's own name.
    Returns the file's path."""
    path = Path(path)
    if path.is_dir():
        path = path / plan_file_name(plan)
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(plan_to_text(plan, sources), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot write the plan: {reason}", where=str(path)) from None
    return path


def load_plan(path: Path | str) -> Plan:
    """Raises NotFoundError if there is no such file, UsageError if it holds no unchanged plan of this version."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_PLAN_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError("no such plan", where=str(path), hint=f"diloco plan INVENTORY -o {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read the plan: {(error.strerror or '').lower()}", where=str(path)) from None
    if len(raw) > MAX_PLAN_BYTES:
        raise UsageError(f"larger than {MAX_PLAN_BYTES // 10**6} MB", where=str(path))
    return plan_from_text(raw.decode("utf-8", errors="replace"), str(path))


def sources_in(path: Path | str) -> Any:
    """What a plan file that was loaded says of the files that it was made from."""
    return parse_object(Path(path).read_bytes(), MAX_PLAN_BYTES).get("sources")


def plan_differences(old: Plan, new: Plan) -> list[str]:
    """Lines such as `~ islands.home.local_steps: 33 -> 38`, `+ islands.tokyo`, `- islands.home` for what changed, was
    added and removed; causes first."""
    before, after = to_plain(old), to_plain(new)
    names = [*CAUSES, *(name for name in before if name not in (*CAUSES, *SAYINGS))]
    return [line for name in names for line in _differences(before[name], after[name], name)]


def summary_of(changes: list[str]) -> str:
    """`2 to add, 40 to change, 1 to remove`."""
    count = {sign: sum(line.startswith(sign) for line in changes) for sign in "+~-"}
    return f"{count['+']} to add, {count['~']} to change, {count['-']} to remove"


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if old == new:
        return
    before, after = _children(old), _children(new)
    if before is None or after is None:
        yield f"~ {path}: {_shown(old)} -> {_shown(new)}"
        return
    for key in [*before, *(key for key in after if key not in before)]:
        place = f"{path}.{key}"
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
    """The text of an added or removed entry: its reason, or its value."""
    if isinstance(item, dict):
        return f": {item['reason']}" if isinstance(item.get("reason"), str) else ""
    return f": {_shown(item)}"
