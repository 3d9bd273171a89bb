"""The `diloco` command: finds the module of a command and is the one place where errors become text."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from diloco_cli import __version__
from diloco_cli.cli.output import QUIET, report_error, talk, wants_traceback
from diloco_cli.errors import INTERRUPTED_STATUS, DilocoError, NoSpaceError, UsageError, suggestion


@dataclass(frozen=True)
class Listed:
    """A command in the list of `diloco --help`; its own help ends with the examples. `module`: in cli/, if it is not
    the command's name."""

    summary: str
    examples: tuple[str, ...] = ()
    module: str = ""


BEGIN = {
    "init": Listed(
        "Write a run that trains on this machine, or files to edit.",
        ("diloco init", "diloco init fleet --for gcs"),
    ),
    "data": Listed(
        "Token shards of your own text, made and checked.",
        ("diloco data tokenize 'corpus/**/*.txt' -o tokens", "diloco data show gs://my-bucket/tokens --check"),
    ),
    "inventory": Listed(
        "Of this machine, measured; or of a cluster's nodes.",
        ("diloco inventory probe -f run.yaml", "diloco inventory from slurm -o inventory.yaml"),
        module="init",
    ),
    "plan": Listed(
        "Islands, schedule and predictions for the hardware there is.",
        (
            "diloco plan run.yaml",
            "diloco plan inventory.yaml -f run.yaml -o fleet.plan.json",
            "diloco plan --add auto --deadline '3 d'",
        ),
    ),
    "simulate": Listed(
        "What would happen, in virtual time.",
        ("diloco simulate run run.yaml --for 1h", "diloco simulate goodput --chips 300k --learners 4 --days 1"),
    ),
    "doctor": Listed("Prove a store before a run trusts it.", ("diloco doctor gs://my-bucket/runs",)),
}
TRAIN = {
    "launch": Listed(
        "Start a run and its units here, and watch them.",
        ("diloco launch run.yaml", "diloco launch run.yaml --set train.tokens=2M --detach"),
    ),
    "status": Listed("The run at a glance, from the bucket alone.", ("diloco status --watch", "diloco status my-run")),
    "logs": Listed("What the units of this machine printed.", ("diloco logs syncer --lines 50",), module="events"),
    "events": Listed("What happened, and by whom.", ("diloco events -f", "diloco events my-run --since 2h --json")),
    "stop": Listed("Stop a run cleanly, on all machines.", ("diloco stop my-run",), module="operators"),
    "resume": Listed(
        "Go on with a run from its bucket alone.", ("diloco resume gs://my-bucket/runs/my-run",), module="operators"
    ),
    "runs": Listed(
        "The runs of this machine, or of a bucket.",
        ("diloco runs", "diloco runs gs://my-bucket/runs", "diloco runs rm my-run"),
    ),
}
RESULTS = {
    "export": Listed(
        "Write the parameters, as safetensors or for transformers.",
        ("diloco export my-run -o model.safetensors", "diloco export my-run --to hf -o my-model"),
        module="parameters",
    ),
    "generate": Listed(
        "Write text with the newest parameters.",
        ('diloco generate my-run --prompt "def main(" --tokens 200',),
        module="parameters",
    ),
    "evaluate": Listed(
        "The held-out loss of the newest parameters.",
        ("diloco evaluate my-run",),
        module="parameters",
    ),
    "report": Listed(
        "A run as a page, a picture or a table to show.",
        ("diloco report my-run -o my-run.html", "diloco report my-run --format csv"),
        module="run_data",
    ),
    "wandb": Listed("Send a run to Weights & Biases.", ("diloco wandb my-run --project nano",), module="run_data"),
    "verify": Listed("Replay the log and compare every digest.", ("diloco verify my-run",), module="run_data"),
}
OPERATE = {
    "chaos": Listed(
        "Break units of a run on this machine, and heal them.",
        ("diloco chaos kill syncer", "diloco chaos pause iowa --for 10s", "diloco chaos run spot-storm my-run"),
    ),
    "rollback": Listed(
        "Go back to the parameters of an earlier commit.", ("diloco rollback my-run --to 400",), module="operators"
    ),
    "gc": Listed("Delete now what only older commits need.", ("diloco gc my-run --dry-run",), module="operators"),
    "quarantine": Listed("Keep a learner out of a run.", ("diloco quarantine iowa my-run",), module="operators"),
    "readmit": Listed("End a learner's quarantine.", ("diloco readmit iowa my-run",), module="operators"),
    "config": Listed(
        "Settings of a run and their origin; JSON Schemas.",
        ("diloco config show -f run.yaml --origin", "diloco config schema status"),
    ),
    "key": Listed("Keys of a signed run.", ("diloco key new run.key",)),
    "bucket-policy": Listed(
        "A bucket policy for one role of a run.",
        ("diloco bucket-policy gs://my-bucket/runs/my-run learner --name iowa",),
        module="key",
    ),
}
DAEMONS = {
    "learner": Listed(
        "One island's learner.", ("diloco learner --run gs://my-bucket/runs/my-run --name iowa",), module="daemons"
    ),
    "syncer": Listed(
        "The syncer: merges offers and writes the log.", ("diloco syncer gs://my-bucket/runs/my-run",), module="daemons"
    ),
    "unit": Listed(
        "One of them, kept alive inside a job.", ("diloco unit iowa --run gs://my-bucket/runs/my-run",), module="unit"
    ),
}
GROUPS = {
    "Begin": BEGIN,
    "Train": TRAIN,
    "Results": RESULTS,
    "Operate": OPERATE,
    "Daemons, which launch starts": DAEMONS,
}
HIDDEN = {"evaluator": Listed("", module="daemons")}
COMMANDS = {name: listed for group in GROUPS.values() for name, listed in group.items()}
EPILOG = "\b\nFirst steps: diloco init, then diloco launch run.yaml\nMore of each, with examples: diloco COMMAND -h"


BUG_STATUS = 1
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
WIDEST = max(map(len, COMMANDS))
EVERYWHERE = QUIET | {"--debug"}


class CommandGroup(TyperGroup):
    """Loads the module of a command that is used, and no other, so that each starts fast; lists them by groups. (A
    context has no type here: typer's releases take its class from different packages.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *HIDDEN]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in self.list_commands(ctx):
            alone = typer.Typer(rich_markup_mode=None)
            add_command(alone, cmd_name)
            self.commands[cmd_name] = typer.main.get_group(alone).commands[cmd_name]
        if cmd_name not in self.commands and not ctx.resilient_parsing:
            raise UsageError(f"no such command: {cmd_name}{suggestion(cmd_name, COMMANDS)}", hint="diloco -h")
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(WIDEST), listed.summary) for name, listed in group.items()])


app = typer.Typer(
    name="diloco",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="Show no progress."),
) -> None:
    """Train one model on islands of accelerators that only share a bucket (Decoupled DiLoCo)."""


def add_command(to: typer.Typer, name: str) -> None:
    """Its module in `cli/` holds the command, or the group of commands, under its name. Its docstring is its help;
    REGISTRATION says what else typer has to know."""
    listed = {**COMMANDS, **HIDDEN}[name]
    module = importlib.import_module(f"diloco_cli.cli.{listed.module or name}")
    command = getattr(module, name.replace("-", "_"))
    said: dict[str, Any] = {"short_help": listed.summary, "epilog": _examples(listed)}
    if isinstance(command, typer.Typer):
        to.add_typer(command, name=name, **said)
    else:
        to.command(name, **said, **getattr(module, "REGISTRATION", {}).get(name, {}))(command)


def _examples(listed: Listed) -> str | None:
    lines = "".join(f"\n  {example}" for example in listed.examples)
    return f"\b\nExamples:{lines}" if lines else None


def everywhere_first(words: list[str]) -> list[str]:
    """The words with the options of `diloco` itself first: they may also stand after the command."""
    own = words[: words.index("--")] if "--" in words else words
    return [
        *(word for word in own if word in EVERYWHERE),
        *(word for word in own if word not in EVERYWHERE),
        *words[len(own) :],
    ]


def main() -> None:
    """Entry point: every declared error ends with its own exit status; tracebacks are shown with --debug only."""
    sys.argv[1:] = everywhere_first(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an output that is not UTF-8 has no bars and dashes
    try:
        sys.exit(_status_of_command())
    except DilocoError as error:
        _end(error)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            _end(_full_disk(error))
        if wants_traceback():
            raise
        _end_by_a_bug(error)
    finally:
        _flush()


def _status_of_command() -> int:
    """The exit status of the command that the words name. Raises UsageError for words that are wrong, if a program
    reads the output; a person sees the command's usage."""
    try:
        status = app(standalone_mode=False)
    except typer.Abort:
        talk("aborted")
        return BUG_STATUS
    except SystemExit:
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # the parser's word for a reader that has gone
            return 0
        raise
    except Exception as error:
        if not (hasattr(error, "format_message") and hasattr(error, "show")):  # typer's releases differ in its class
            raise
        if "--json" in sys.argv:
            hint = " ".join(["diloco", *_command_of(getattr(error, "ctx", None)), "-h"])
            raise UsageError(error.format_message(), hint=hint) from error
        error.show()
        return UsageError.exit_status
    return status if isinstance(status, int) else 0


def _command_of(ctx: Any) -> list[str]:
    """The names of the command and its groups, without the program's own."""
    return [] if ctx is None or ctx.parent is None else [*_command_of(ctx.parent), ctx.info_name]


def _end_by_a_bug(error: Exception) -> NoReturn:
    """Of the user's own code, if the error was raised there; else of diloco."""
    from diloco_cli.events.cause import cause_of

    cause = cause_of(error)
    report = " to see the whole traceback" if cause.place else " and report what it prints"
    text = cause.text if cause.place else f"a bug in diloco: {cause.text}"
    with suppress(OSError):
        report_error(DilocoError(text, hint=f"run the same command with DILOCO_DEBUG=1{report}"))
    sys.exit(BUG_STATUS)


def _end(error: DilocoError) -> NoReturn:
    if wants_traceback():
        traceback.print_exc()
    with suppress(OSError):  # stderr is closed, or on a full disk
        report_error(error)
        _say_where(error)
    sys.exit(error.exit_status)


def _say_where(error: DilocoError) -> None:
    """The file and line of the user's own code, if that caused the error."""
    if error.__cause__ is None:
        return
    from diloco_cli.events.cause import cause_of

    cause = cause_of(error)
    if cause.place:
        talk(f"cause: {cause.text}")


def _full_disk(error: OSError) -> NoSpaceError:
    what = "the disk quota is used up" if error.errno == errno.EDQUOT else "no space left on the disk"
    return NoSpaceError(what, where=error.filename and str(error.filename), hint="free some space, then run it again")


def _flush() -> None:
    """If the reader has gone (`| head`, a closed terminal), buffered output must not cause an error at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
