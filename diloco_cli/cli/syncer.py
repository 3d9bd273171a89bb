"""`diloco syncer`: the daemon that merges; with --standby a syncer that waits to take over."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli import complete
from diloco_cli.cli.consent import AllowCode, AllowStore, named_here
from diloco_cli.environment import DEVICE_VARIABLE, set_environment
from diloco_cli.errors import UsageError

if TYPE_CHECKING:
    from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
    from diloco_cli.store.port import Store


def syncer(
    url: str | None = typer.Argument(None, metavar="URL", help="URL of the run's bucket and prefix; or --run URL."),
    run: str | None = typer.Option(None, "--run", help="The same."),
    standby: bool = typer.Option(False, "--standby", help="Wait, and take over once no syncer serves the run."),
    name: str | None = typer.Option(None, "--name", help="With --standby: its name in `status`; default: standby."),
    instead_of: int | None = typer.Option(None, "--instead-of", hidden=True, help="Pid of its dead predecessor here."),
    hosted: bool = typer.Option(False, "--hosted", hidden=True, help="Leave when stdin closes, work at low priority."),
    evaluator_device: str | None = typer.Option(
        None,
        "--evaluator-device",
        metavar="DEVICE",
        help="Where the held-out loss is computed. Default: DILOCO_EVALUATOR_DEVICE, or cpu.",
        autocompletion=complete.devices,
    ),
    allow_code: list[str] = AllowCode,
    allow_store: list[str] = AllowStore,
) -> None:
    """Run the syncer: merges offers and writes the commit log of the run at URL."""
    if (url is None) == (run is None):
        raise UsageError("which run? give its URL once", hint="diloco syncer gs://my-bucket/runs/my-run")
    place, here = url or run or "", named_here(allow_code, allow_store)
    if evaluator_device is not None:
        set_environment(DEVICE_VARIABLE, evaluator_device)
    from diloco_cli.protocol.log.keys import SYNCER
    from diloco_cli.runtime.restart import telling_why

    if not standby:
        if name is not None or hosted or instead_of is not None:
            raise UsageError("--name, --hosted and --instead-of belong to a standby", hint="add --standby")
        from diloco_cli.syncer.daemon import run_syncer

        with telling_why(place, SYNCER):
            sys.exit(run_syncer(place, _rebuilt, here))
    from diloco_cli.runtime.files import checked_name
    from diloco_cli.syncer.standby import run_standby

    called = checked_name(name or "standby", "name of a standby")
    with telling_why(place, called):
        sys.exit(run_standby(place, called, instead_of, hosted, _rebuilt, here))


def _rebuilt(run: RunFormat, store: Store, version: FragmentVersion) -> bytes | None:
    from diloco_cli.observe.rebuild import lost, rebuilt_state  # torch: only where a state is lost

    state = rebuilt_state(run, store, version)
    if state is None:
        raise lost(run, store, version)
    return state
