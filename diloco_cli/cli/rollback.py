"""`diloco rollback`: back to how the parameters were after an earlier commit.

Every fragment becomes what it was after that commit; nothing is taken out of the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.operators import (
    DryRunOption,
    JsonOption,
    TimeoutOption,
    YesOption,
    confirm,
    open_unfinished,
    operator_of,
)
from diloco_cli.cli.output import print_json, progress, talk
from diloco_cli.cli.run_argument import OpenRun, RunArgument
from diloco_cli.errors import UsageError

if TYPE_CHECKING:
    from diloco_cli.protocol.actors.rollback import Return
    from diloco_cli.protocol.log.state import RunState


def rollback(
    run: str | None = RunArgument,
    to: int = typer.Option(..., "--to", metavar="COMMIT", help="The commit to go back to."),
    dry_run: bool = DryRunOption,
    yes: bool = YesOption,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """Go back to how the parameters were after an earlier commit."""
    opened, state = open_unfinished(run, "rollback")
    plan = _plan(opened, state, to)
    data = _data(opened, plan)
    if not as_json:
        _show(opened.name, data)
    if not dry_run:
        confirm(f"roll run {opened.name} back to commit {to}?", yes)
        with progress("asking the syncer"):
            state = operator_of(opened, timeout_s).request("rollback", to=to)
        data |= {"commit": state.n, "version": state.base_floor}
    if as_json:
        print_json("rollback", data | {"dry_run": dry_run})
    elif not dry_run:
        print(f"run {opened.name}: back to commit {to}, as version {state.base_floor} of every fragment")
        talk(f"hint: to undo it: diloco rollback {opened.name} --to {state.base_floor - 1}")


def _plan(opened: OpenRun, state: RunState, to: int) -> Return:
    from diloco_cli.protocol.actors.rollback import missing_objects, return_to

    plan = opened.perform(return_to(opened.format, state, to))
    if isinstance(plan, str):
        raise UsageError(plan, where=opened.name, hint=f"diloco logs syncer --run {opened.name}")
    missing = opened.perform(missing_objects(plan.then.outputs))
    if missing:
        raise UsageError(f"not there any more: {missing[0]} (and {len(missing) - 1} more)", where=opened.name)
    return plan


def _data(opened: OpenRun, plan: Return) -> dict[str, Any]:
    layout = opened.format.layout
    changed = sum(o.state_digest != c.state_digest for o, c in zip(plan.then.outputs, plan.now.outputs, strict=True))
    return {
        "run": opened.name,
        "to": plan.then.n,
        "time": plan.then.metrics.updated_at,
        "commit": plan.now.n,
        "merges_left": plan.now.merges - plan.then.merges,
        "tokens_left": plan.tokens_left(layout),
        "tokens": plan.then.tokens(layout),
        "tokens_before": plan.now.tokens(layout),
        "loss": plan.then.metrics.loss,
        "loss_before": plan.now.metrics.loss,
        "fragments_changed": changed,
        "fragments": len(plan.then.outputs),
    }


def _show(name: str, data: dict[str, Any]) -> None:
    def loss(value: float | None) -> str:
        return "not evaluated" if value is None else f"{value:.4f}"

    print(f"run {name}: from commit {data['commit']} back to commit {data['to']} of {data['time']}")
    merges = f"{data['merges_left']} merges of commits {data['to'] + 1} to {data['commit']}"
    print(f"  no longer counts  {merges}, {data['tokens_left']:,} tokens")
    print(f"  tokens            {data['tokens_before']:,} -> {data['tokens']:,}; the learning rate goes back with them")
    print(f"  loss              {loss(data['loss_before'])} -> {loss(data['loss'])}")
    print(f"  fragments         {data['fragments_changed']} of {data['fragments']} change")
    print("  learners          replace their parameters and go on; their data is not read again")
