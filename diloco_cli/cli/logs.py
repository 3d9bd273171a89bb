"""`diloco logs`: what the units on this machine printed."""

from __future__ import annotations

import typer

from diloco_cli.cli import complete
from diloco_cli.cli.run_argument import find_run
from diloco_cli.errors import INTERRUPTED_STATUS


def logs(
    unit: str | None = typer.Argument(
        None, help="A learner's name, syncer or supervisor; all if none is given.", autocompletion=complete.units
    ),
    run: str | None = typer.Option(
        None, "--run", help="Name or URL of the run; the newest one here if not given.", autocompletion=complete.runs
    ),
    lines: int = typer.Option(20, "--lines", min=0, help="How many last lines of each log."),
    follow: bool = typer.Option(False, "-f", "--follow", help="Go on with what is added, until Ctrl-C."),
) -> None:
    """Print the logs that a run's units and their supervisor wrote on this machine, in the order of time."""
    from diloco_cli.runtime.logs import Line, by_time, log_files, tail
    from diloco_cli.runtime.logs import follow as follow_logs

    files = log_files(find_run(run).name, unit)
    width = max(map(len, files)) if len(files) > 1 else 0

    def show(line: Line) -> None:
        print(f"{line.unit:<{width}} | {line.text}" if width else line.text, flush=True)

    added = follow_logs(files) if follow else iter(())
    for line in by_time((Line(name, text) for name, path in files.items() for text in tail(path, lines)), {}):
        show(line)
    try:
        for line in added:
            show(line)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_STATUS) from None
