"""Finds the run that a person names: by name, bucket URL or run file; without one, the newest of this directory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_cli.clock import wall_s
from diloco_cli.errors import NotFoundError
from diloco_cli.paths import home_directory, run_directory
from diloco_cli.runtime.files import NAME, checked_name, read_json, write_json

MAX_RUNS = 10_000
LAUNCH_HINT = "start one with `diloco launch RUN.yaml`, or see `diloco runs`"


@dataclass(frozen=True)
class KnownRun:
    """A run that this directory has seen: `run.json`."""

    name: str
    url: str
    created_s: float


def remember_run(name: str, url: str) -> KnownRun:
    """Notes the run in this directory; the first noted time of creation stays."""
    known = read_run(name)
    run = KnownRun(checked_name(name, "name of a run"), url, known.created_s if known else wall_s())
    body = {"name": run.name, "url": run.url, "created_s": run.created_s}
    write_json(run_directory(name) / "run.json", body)
    return run


def read_run(name: str) -> KnownRun | None:
    """The noted run; None if there is none here, or its file is invalid: the bucket alone is enough."""
    try:
        body = read_json(run_directory(checked_name(name, "name of a run")) / "run.json")
        return None if body is None else _run_from_json(body, name)
    except ValueError:
        return None


def known_runs() -> list[KnownRun]:
    """All runs of this directory, newest first."""
    home = home_directory()
    names = sorted(path.name for path in home.iterdir()) if home.is_dir() else []
    runs = [run for name in names[:MAX_RUNS] if NAME.fullmatch(name) and (run := read_run(name))]
    return sorted(runs, key=lambda run: (run.created_s, run.name), reverse=True)


def newest_run() -> KnownRun:
    runs = known_runs()
    if not runs:
        raise NotFoundError("no run is known", where=str(home_directory()), hint=LAUNCH_HINT)
    return runs[0]


def resolve_run(text: str | None, say: Callable[[str], None]) -> KnownRun:
    """The run of this directory with that name or URL; `say` reports which run was chosen if none was given."""
    if text is None:
        run = newest_run()
        say(f"run {run.name} ({run.url}), the newest of this directory")
        return run
    by_name = {run.name: run for run in reversed(known_runs())}
    by_url = {run.url.rstrip("/"): run for run in by_name.values()}
    found = by_name.get(text) or by_url.get(text.rstrip("/"))
    if found is None:
        known = ", ".join(list(by_name)[-5:]) or "none"
        message = f"run {text!r} is not known to this directory; known: {known}"
        raise NotFoundError(message, where=str(home_directory()), hint=LAUNCH_HINT)
    return found


def _run_from_json(body: dict[str, Any], name: str) -> KnownRun | None:
    url, created_s = body.get("url"), body.get("created_s")
    if body.get("name") != name or not isinstance(url, str) or not isinstance(created_s, int | float):
        return None
    return KnownRun(name, url, float(created_s)) if math.isfinite(created_s) else None
