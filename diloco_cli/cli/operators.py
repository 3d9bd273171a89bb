"""What operators' commands share: their options, the run that they operate on, and a question beforehand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli.output import talk
from diloco_cli.cli.run_argument import OpenRun, head_of, open_run
from diloco_cli.errors import RefusedError, TryAgainError

if TYPE_CHECKING:
    from diloco_cli.protocol.log.records import RequestKind
    from diloco_cli.protocol.log.state import RunState
    from diloco_cli.syncer.operator import Operator

TimeoutOption = typer.Option(
    None,
    "--timeout",
    metavar="S",
    help="Seconds of the syncer's silence before this command answers.  [default: 10, more with large fragments, or "
    "twice its longest so far]",
)
YesOption = typer.Option(False, "-y", "--yes", help="Do not ask.")
DryRunOption = typer.Option(False, "-n", "--dry-run", help="Only say what would be done.")
JsonOption = typer.Option(False, "--json", help="One JSON object.")


def open_unfinished(run: str | None, kind: RequestKind) -> tuple[OpenRun, RunState]:
    """The run and the head of its log. A run that is FINISHED, or has no version yet, is not operated on."""
    from diloco_cli.syncer.operator import refuse_finished

    opened = open_run(run)
    state = head_of(opened)
    refuse_finished(opened.name, state, kind)
    if state.n < 0:
        raise TryAgainError(f"run {opened.name} has no commit yet", hint=f"diloco status {opened.name}")
    return opened, state


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere only --yes will do. Raises RefusedError (exit 8) for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise RefusedError("this cannot be taken back, and nobody is there to ask", hint="say so beforehand: --yes")
    if not typer.confirm(question, default=False, err=True):
        raise RefusedError("nothing was changed")


def operator_of(opened: OpenRun, timeout_s: float | None = None) -> Operator:
    """Puts requests to the run's syncer."""
    from diloco_cli.runtime.consent import refused_stores
    from diloco_cli.syncer.operator import Operator

    regions = opened.format.region_urls
    refused = refused_stores(opened.format, opened.url, regions)
    may_write = tuple(url for url in regions if url not in refused)
    return Operator(opened.format, opened.store, opened.clock, talk, timeout_s, may_write)
