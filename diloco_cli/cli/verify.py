"""`diloco verify`: replays the log from the bucket and compares every digest."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli.output import envelope
from diloco_cli.cli.run_argument import RunArgument, open_run
from diloco_cli.errors import DataCheckError

if TYPE_CHECKING:
    from diloco_cli.syncer.replay import Replay

SHOWN = 5


def register(app: typer.Typer) -> None:
    app.command("verify", help="Replay the commit log from the bucket alone and compare every digest.")(verify)


def verify(
    run: str | None = RunArgument,
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Replay the commit log and compare every digest. Exit 11 if anything differs."""
    from diloco_cli.syncer.replay import Replayer

    opened = open_run(run)
    found = Replayer(opened.store, opened.format).replay()
    error = None if found.ok else disagreement(found, opened.url)
    if as_json:
        data = {"run": opened.name, **asdict(found), "missing": len(found.missing), "missing_keys": found.missing}
        print(envelope("verify", data | {"ok": found.ok}, error=error), flush=True)
        if error is not None:
            raise typer.Exit(error.exit_status)
        return
    counted = f"{found.commits} commits, {found.merges} merges, {found.epochs} epochs, {found.tokens:,} tokens"
    print(f"run {opened.name}: {counted}, {found.offers_applied} offers applied, {found.offers_rejected} not used")
    if error is not None:
        raise error
    print("ok: the replay gives bit-identical outer parameters; nothing missing, nothing applied twice")


def disagreement(found: Replay, url: str) -> DataCheckError:
    """The first few problems as one error (exit 11)."""
    problems = [*(f"missing: {key}" for key in found.missing), *found.mismatches]
    problems += [f"{found.duplicates} offers applied twice"] if found.duplicates else []
    more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
    return DataCheckError(
        f"the bucket does not agree with its log: {'; '.join(problems[:SHOWN])}{more}",
        where=url,
        hint="see them all: diloco verify RUN --json",
    )
