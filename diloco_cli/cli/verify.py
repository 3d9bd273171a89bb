"""`diloco verify`: replays the log from the bucket and compares every digest."""

from __future__ import annotations

from dataclasses import asdict

import typer

from diloco_cli.cli.output import print_json
from diloco_cli.cli.run_argument import RunArgument, open_run
from diloco_cli.errors import DataCheckError

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
    if as_json:
        print_json("verify", {"run": opened.name, **asdict(found), "missing": len(found.missing), "ok": found.ok})
    else:
        counted = f"{found.commits} commits, {found.merges} merges, {found.epochs} epochs, {found.tokens:,} tokens"
        print(f"run {opened.name}: {counted}, {found.offers_applied} offers applied, {found.offers_rejected} not used")
    if found.ok:
        if not as_json:
            print("ok: the replay gives bit-identical outer parameters; nothing missing, nothing applied twice")
        return
    problems = [*(f"missing: {key}" for key in found.missing), *found.mismatches]
    problems += [f"{found.duplicates} offers applied twice"] if found.duplicates else []
    if as_json:
        raise typer.Exit(DataCheckError.exit_status)
    more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
    raise DataCheckError(
        f"the bucket does not agree with its log: {'; '.join(problems[:SHOWN])}{more}", where=opened.url
    )
