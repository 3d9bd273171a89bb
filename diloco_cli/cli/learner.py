"""`diloco learner`: the daemon of one island."""

from __future__ import annotations

import sys

import typer


def register(app: typer.Typer) -> None:
    app.command("learner", help="Run one island's learner: joins the run at URL, trains until it is over.")(learner)


def learner(
    run: str = typer.Option(..., "--run", help="URL of the run's bucket and prefix."),
    name: str = typer.Option(..., "--name", help="Which island this is."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, cuda:N or mps; default: the island's."),
) -> None:
    """Run one island's learner."""
    from diloco_cli.learner.daemon import run_learner

    sys.exit(run_learner(run, name, device))
