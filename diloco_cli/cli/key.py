"""`diloco key`: makes an operator's secret, and of it the keys of learners and syncers on other machines."""

from __future__ import annotations

from pathlib import Path

import typer

from diloco_cli.cli.output import talk
from diloco_cli.cli.run_argument import OpenRun, open_run
from diloco_cli.errors import UsageError
from diloco_cli.randomness import nonce
from diloco_cli.signing import KEY_FILE_VARIABLE

FILE_HELP = "Where to write it, readable by its owner alone. The key itself is never shown."
FileArgument = typer.Argument(..., metavar="FILE", help=FILE_HELP)
key = typer.Typer(help="Keys with which records are signed.", no_args_is_help=True, rich_markup_mode=None)


@key.command("new")
def new(file: Path = FileArgument) -> None:
    """Make an operator's secret, for one or more runs: for the machine that launches them, and no other."""
    from diloco_cli.runtime.signing_key import write_key

    write_key(file, nonce() + nonce())
    print(file)
    talk(f"next: {KEY_FILE_VARIABLE}={file.absolute()} diloco launch RUN.yaml")


RunArgument = typer.Argument(..., metavar="RUN", help="A run's name, its run file, or its bucket URL.")


@key.command("learner")
def learner(
    run: str = RunArgument,
    name: str = typer.Argument(..., metavar="LEARNER", help="Its name, also if it has not joined yet."),
    file: Path = FileArgument,
) -> None:
    """Make the key of one learner of a signed run, out of the operator's secret in the environment."""
    from diloco_cli.launch.local_units import signers_on
    from diloco_cli.runtime.files import checked_name

    checked_name(name, "the name of a learner")
    opened = open_run(run)
    hand_over(opened, signers_on(opened.format, name), file)
    if opened.format.settings.syncer.on_learners:
        talk(f"{name} hosts a standby syncer, so its owner is trusted with the log")
    talk(f"next: {KEY_FILE_VARIABLE}={file.absolute()} diloco learner --run {opened.url} --name {name}")


@key.command("syncer")
def syncer(run: str = RunArgument, file: Path = FileArgument) -> None:
    """Make the key of a machine that runs a syncer of a signed run. It signs the log, and nothing else."""
    from diloco_cli.signing import LOG

    opened = open_run(run)
    hand_over(opened, (LOG,), file)
    talk(f"next: {KEY_FILE_VARIABLE}={file.absolute()} diloco syncer --run {opened.url}")


def hand_over(opened: OpenRun, signers: tuple[str, ...], file: Path) -> None:
    """Write the keys of these signers to a new file. Raises UsageError for an unsigned run, or without a secret."""
    from diloco_cli.runtime.signing_key import signing_secret, write_key
    from diloco_cli.signing import KEY_HINT

    secret = signing_secret()
    if opened.format.signing is None:
        raise UsageError(f"run {opened.name} is not signed: it needs no keys", where=opened.url)
    if secret is None:
        raise UsageError("keys are made from the operator's secret, which is not there", hint=KEY_HINT)
    write_key(file, secret.certified(opened.format.run_id, signers))
    print(file)
