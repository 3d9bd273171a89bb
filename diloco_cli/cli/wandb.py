"""`diloco wandb`: a run in Weights & Biases, fed from its bucket by this one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from diloco_cli.cli.output import progress, talk
from diloco_cli.cli.run_argument import RunArgument, open_run
from diloco_cli.cli.watch import riding_out
from diloco_cli.clock import sleep_s
from diloco_cli.errors import INTERRUPTED_STATUS
from diloco_cli.paths import wandb_directory

if TYPE_CHECKING:
    from diloco_cli.metrics.wandb_feed import Feed

EVERY_S = 5.0


def wandb(
    run: str | None = RunArgument,
    project: str = typer.Option("diloco", "--project", help="W&B's project."),
    entity: str | None = typer.Option(None, "--entity", help="W&B's entity; without it, your default."),
    offline: bool = typer.Option(False, "--offline", help="Only write files here, for `wandb sync`."),
    once: bool = typer.Option(False, "--once", help="Send what there is, and end; else go on until the run ends."),
) -> None:
    """Send a run's loss and pace to Weights & Biases: one W&B run, whose steps are commits, however often this
    starts."""
    from diloco_cli.metrics.wandb_feed import CommitPoints, Feed, start_wandb

    opened = open_run(run)
    folder = wandb_directory(opened.name)
    started = start_wandb(opened.format, project, entity, offline, folder)
    first = None if offline else started.step
    feed = Feed(started, CommitPoints(opened.format, opened.store), folder / "position.json", first)
    status = 0
    try:
        with progress(f"sending run {opened.name} to W&B, until it ends"):
            if once:
                feed.send()
            else:
                feed_to_the_end(feed)
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    finally:
        started.finish(exit_code=0)
    talk(f"run {opened.name}: commits up to {feed.next - 1} are in {'the files here' if offline else 'W&B'}")
    if offline:
        talk(f"hint: wandb sync {folder}/wandb/offline-run-*")
    raise typer.Exit(status)


def feed_to_the_end(feed: Feed) -> None:
    """A run takes days, and its store may be away for minutes of them."""
    is_over = False
    while not is_over:
        with riding_out("wandb"):
            is_over = feed.send()
        if not is_over:
            sleep_s(EVERY_S)
