"""The files that a plan was made from, noted in the plan's own file, so that `launch` can tell that they have changed.

They are noted beside the plan and are no part of it: the same hardware and run give the same plan, wherever they
lie."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.config.codec import from_plain, to_plain
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import inventory_path_of, load_run, load_run_with_origins
from diloco_cli.digests import digest
from diloco_cli.errors import DilocoError, UsageError


@dataclass(frozen=True)
class PlanSources:
    """Paths are relative to the plan's folder; digests are of what the files say, without comments or --set."""

    inventory: str
    inventory_digest: str
    run: str
    run_digest: str
    overrides: tuple[str, ...] = ()


def sources_of(inventory: Path | None, file: Path | None, overrides: list[str], plan: Path) -> PlanSources | None:
    """None for a plan of the template run, which has no file of the user."""
    if file is None:
        return None
    found = inventory or inventory_path_of(load_run(file, overrides), file)
    if found is None:
        return None
    there, run = (os.path.relpath(path, plan.parent) for path in (found, file))
    return PlanSources(there, _inventory_digest(found), run, _run_digest(file), tuple(overrides))


def refuse_changed_sources(noted: Any, plan: Path) -> None:
    """Raises UsageError if a file that the plan was made from is there and says something else now."""
    try:
        sources = from_plain(PlanSources, noted)
    except UsageError:
        return  # a plan of an earlier version, or of the template run
    inventory, run = (Path(os.path.normpath(plan.parent / path)) for path in (sources.inventory, sources.run))
    changed = [
        str(path)
        for path, was, now in (
            (inventory, sources.inventory_digest, _inventory_digest),
            (run, sources.run_digest, _run_digest),
        )
        if path.is_file() and _differs(was, now, path)
    ]
    if changed:
        words = [
            "diloco",
            "plan",
            str(inventory),
            "-f",
            str(run),
            *(f"--set={o}" for o in sources.overrides),
            "-o",
            str(plan),
        ]
        have = "have" if len(changed) > 1 else "has"
        raise UsageError(
            f"{' and '.join(changed)} {have} changed since this plan was made",
            where=str(plan),
            hint=f"make it again: {shlex.join(words)}",
        )


def _differs(was: str, digest_of: Any, path: Path) -> bool:
    try:
        return bool(digest_of(path) != was)
    except DilocoError:  # not readable any more is changed
        return True


def _inventory_digest(path: Path) -> str:
    return _digest(load_inventory(path))


def _run_digest(path: Path) -> str:
    return _digest(load_run_with_origins(path, only_file=True)[0])


def _digest(settings: Any) -> str:
    return digest(json.dumps(to_plain(settings), sort_keys=True, allow_nan=False).encode())
