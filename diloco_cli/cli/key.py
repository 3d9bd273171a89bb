"""`diloco key`: makes the secret of signed runs, and the keys of learners that other people or machines start."""

from __future__ import annotations

from pathlib import Path

import typer

from diloco_cli.cli.output import talk
from diloco_cli.cli.run_argument import open_run
from diloco_cli.errors import UsageError
from diloco_cli.randomness import nonce

FILE_HELP = "Where to write it, readable by its owner alone. The key itself is never shown."
FileArgument = typer.Argument(..., metavar="FILE", help=FILE_HELP)
key = typer.Typer(help="Keys with which records are signed.", no_args_is_help=True, rich_markup_mode=None)


@key.command("new")
def new(file: Path = FileArgument) -> None:
    """Make the secret of one or more runs: for the machine that launches them, and for their syncers and operators."""
    from diloco_cli.runtime.signing_key import write_key
    from diloco_cli.signing import KEY_FILE_VARIABLE

    write_key(file, nonce() + nonce())
    print(file)
    talk(f"next: {KEY_FILE_VARIABLE}={file.absolute()} diloco launch RUN.yaml")


@key.command("learner")
def learner(
    run: str = typer.Argument(..., metavar="RUN", help="A run's name, its run file, or its bucket URL."),
    name: str = typer.Argument(..., metavar="LEARNER", help="Its name, also if it has not joined yet."),
    file: Path = FileArgument,
) -> None:
    """Make the keys of one learner of a signed run, out of the run's secret in the environment."""
    from diloco_cli.runtime.files import checked_name
    from diloco_cli.runtime.signing_key import signing_secret, write_key
    from diloco_cli.signing import KEY_FILE_VARIABLE, KEY_HINT

    checked_name(name, "the name of a learner")
    opened, secret = open_run(run), signing_secret()
    if opened.format.signing is None:
        raise UsageError(f"run {opened.name} is not signed: its learners need no key", where=opened.url)
    if secret is None:
        raise UsageError("learners' keys are made from the run's secret, which is not there", hint=KEY_HINT)
    write_key(file, secret.for_learner(opened.format.run_id, name))
    print(file)
    talk(f"next: {KEY_FILE_VARIABLE}={file.absolute()} diloco learner --run {opened.url} --name {name}")
