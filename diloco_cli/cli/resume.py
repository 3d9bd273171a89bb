"""`diloco resume`: goes on with a run from the bucket alone."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from diloco_cli.cli.consent import AllowCode, AllowStore, named_here
from diloco_cli.cli.hooks import OnEvent, Webhook, hooks_of
from diloco_cli.cli.run_argument import RunArgument, is_run_file, open_run


def resume(
    run: str | None = RunArgument,
    region: str | None = typer.Option(None, "--region", help="Start only this region's islands."),
    detach: bool = typer.Option(False, "--detach", help="Supervise in the background."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object at the end."),
    on_event: str | None = OnEvent,
    webhook: str | None = Webhook,
    allow_code: list[str] = AllowCode,
    allow_store: list[str] = AllowStore,
) -> None:
    """Go on with a run from its bucket alone; living units are adopted. Ctrl-C ends what runs here; the run goes on."""
    from diloco_cli.cli.supervision import go_on
    from diloco_cli.runtime.registry import remember_run

    hooks = hooks_of(on_event, webhook)
    opened = open_run(run, at_home=False)
    remember_run(opened.name, opened.url)
    here = named_here(allow_code, allow_store, Path(run) if run is not None and is_run_file(run) else None)
    sys.exit(go_on(opened, region, detach, as_json, "resume", here, hooks))
