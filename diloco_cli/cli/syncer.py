"""`diloco syncer`: the daemon that merges."""

from __future__ import annotations

import sys

import typer


def register(app: typer.Typer) -> None:
    app.command("syncer", help="Run the syncer: merges offers and writes the commit log of the run at URL.")(syncer)


def syncer(run: str = typer.Option(..., "--run", help="URL of the run's bucket and prefix.")) -> None:
    """Run the syncer."""
    from diloco_cli.syncer.daemon import run_syncer

    sys.exit(run_syncer(run))
