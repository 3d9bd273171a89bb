"""Words that the shell completes: runs, units and devices, from this machine's files alone. Where there are none, the
shell offers files. (A context has no type here: typer's releases take its class from different packages.)"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

DEVICES = ("cpu", "cuda", "cuda:0", "mps")


def runs(incomplete: str) -> list[str]:
    """Those that this directory knows, newest first."""
    from diloco_cli.runtime.registry import known_runs

    return _beginning(incomplete, (run.name for run in known_runs()))


def units(ctx: Any, incomplete: str) -> list[str]:
    """Of the run that was named, or else of the newest one."""
    from diloco_cli.errors import NotFoundError
    from diloco_cli.runtime.registry import SUPERVISOR, list_units, resolve_run

    try:
        run = resolve_run(ctx.params.get("run"), lambda line: None)
    except NotFoundError:
        return []
    return _beginning(incomplete, [*(unit.name for unit in list_units(run.name)), SUPERVISOR])


def devices(incomplete: str) -> list[str]:
    return _beginning(incomplete, DEVICES)


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
