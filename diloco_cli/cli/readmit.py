"""`diloco readmit`: lets a quarantined learner take part again."""

from __future__ import annotations

import typer

from diloco_cli.cli import complete
from diloco_cli.cli.operators import JsonOption, TimeoutOption, open_unfinished, operator_of
from diloco_cli.cli.output import print_json
from diloco_cli.cli.run_argument import RunArgument
from diloco_cli.errors import UsageError


def readmit(
    learner: str = typer.Argument(
        ..., metavar="LEARNER", help="Its name, as `diloco status` shows it.", autocompletion=complete.units
    ),
    run: str | None = RunArgument,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """End a learner's quarantine: its offers are merged again. What norms of deltas are usual is learned anew."""
    opened, state = open_unfinished(run, "readmit")
    kept_out = sorted(name for name, known in state.learners.items() if known.quarantined is not None)
    if learner not in kept_out:
        names = ", ".join(kept_out) or "none"
        raise UsageError(f"{learner!a} is not quarantined in run {opened.name}; quarantined: {names}")
    state = operator_of(opened, timeout_s).request("readmit", "diloco readmit", learner=learner)
    if as_json:
        print_json("readmit", {"run": opened.name, "learner": learner, "commit": state.n})
    else:
        print(f"run {opened.name}: {learner} is readmitted, as of commit {state.n}")
