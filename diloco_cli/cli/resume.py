"""`diloco resume`: goes on with a run from the bucket alone."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from diloco_cli.cli.output import print_json, talk
from diloco_cli.cli.run_argument import OpenRun, RunArgument, head_of, is_run_file, open_run
from diloco_cli.clock import utc_now_text
from diloco_cli.randomness import nonce


def resume(
    run: str | None = RunArgument,
    region: str | None = typer.Option(None, "--region", help="Start only this region's islands."),
    detach: bool = typer.Option(False, "--detach", help="Supervise in the background."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object at the end."),
) -> None:
    """Go on with a run from its bucket alone; living units are adopted."""
    from diloco_cli.runtime.runs import remember_run

    opened = open_run(run, at_home=False)
    remember_run(opened.name, opened.url)
    folder = Path(run).parent if run is not None and is_run_file(run) else None
    sys.exit(go_on(opened, region, detach, as_json, "resume", folder))


def go_on(opened: OpenRun, region: str | None, detach: bool, as_json: bool, command: str, folder: Path | None) -> int:
    """Start (or adopt) what runs here, and watch it, or leave that to a background process. In `folder` units look
    for the modules of entrypoints."""
    from diloco_cli.cli.supervision import print_summary, say_what_runs_elsewhere, supervise_run, units_here

    if head_of(opened).phase == "FINISHED":
        talk(f"run {opened.name} is FINISHED; start another: diloco launch RUN.yaml --set name={opened.name}-2")
        print_summary(opened, command, as_json)
        return 0
    units = units_here(opened.format, opened.url, region, folder)
    say_what_runs_elsewhere(opened.format, opened.url, region)
    if any(unit.kind == "syncer" for unit in units) or opened.format.settings.syncer.on_learners:
        withdraw_stop_requests(opened)
    if detach:
        return _detached(opened, region, as_json, command, folder)
    return supervise_run(opened, units, region is None, command, as_json)


def withdraw_stop_requests(opened: OpenRun) -> None:
    """A stop that nobody was there to carry out (Ctrl-C while the syncer was down) must not stop what starts now."""
    from diloco_cli.protocol.actors.requests import withdraw_stop

    if opened.perform(withdraw_stop(opened.format, head_of(opened), nonce(), utc_now_text())):
        talk("an earlier stop request was never carried out: withdrawn")


def _detached(opened: OpenRun, region: str | None, as_json: bool, command: str, folder: Path | None) -> int:
    from diloco_cli.cli.supervision import module_environment
    from diloco_cli.runtime.detach import start_detached

    words = [sys.executable, "-m", "diloco_cli", "resume", opened.url]
    words += [f"--region={region}"] if region else []
    identity = start_detached(opened.name, tuple(words), module_environment(folder))
    if as_json:
        print_json(
            command, {"run": opened.name, "url": opened.url, "state": "STARTING", "supervisor_pid": identity.pid}
        )
    else:
        print(f"run {opened.name} goes on in the background (supervisor pid {identity.pid})")
        talk(f"hint: diloco status {opened.name} --watch; diloco stop {opened.name}")
    return 0
