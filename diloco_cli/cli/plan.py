"""`diloco plan`: an inventory and a run -> islands, a schedule and predictions."""

from __future__ import annotations

from pathlib import Path

import typer

from diloco_cli.cli.output import print_json, talk

DIFFERS_STATUS = 10


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    inventory: Path = typer.Argument(None, help="The inventory; without it, the one the run file names."),
    file: Path = typer.Option(None, "-f", "--file", help="The run file; without it, the template."),
    output: Path = typer.Option(None, "-o", "--output", help="Write the plan here, for `diloco launch`."),
    against: Path = typer.Option(None, "--against", help="Show how this plan differs from an earlier one."),
    overrides: list[str] = typer.Option([], "--set", help="Change one value of the run file: key.key=value."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Plan islands, schedule and predictions for the hardware of INVENTORY."""
    from diloco_cli.cli.model_probe import facts_of
    from diloco_cli.config.inventory_file import load_inventory
    from diloco_cli.config.run_file import load_run
    from diloco_cli.plan.plan_file import load_plan, plan_differences, plan_to_json, save_plan
    from diloco_cli.plan.planner import make_plan

    earlier = load_plan(against) if against else None
    run_path = file or _template_run()
    run = load_run(run_path, overrides)
    facts = facts_of(run, run_path.parent)
    made = make_plan(run, load_inventory(inventory or _inventory_of(run.inventory, file)), facts)
    if output:
        save_plan(made, output)
        talk(f"plan written to {output}; start it: diloco launch {output}")
    changes = plan_differences(earlier, made) if earlier else []
    if json:
        data = plan_to_json(made) | ({"changes": changes} if earlier else {})
        print_json("plan", data, warnings=list(made.warnings))
    elif earlier:
        print("\n".join(changes) or "no difference")
    else:
        from diloco_cli.cli.plan_view import plan_text

        print(plan_text(made))
    if changes:
        raise typer.Exit(DIFFERS_STATUS)


def _template_run() -> Path:
    from diloco_cli.paths import templates_directory

    path = templates_directory() / "run.yaml"
    talk(f"no run file given: planning for the template {path} (choose one with -f RUN)")
    return path


def _inventory_of(named: str | None, run_path: Path | None) -> Path:
    """The inventory that the run file names, beside it."""
    from diloco_cli.errors import UsageError

    if run_path is None or named is None:
        where = None if run_path is None else str(run_path)
        raise UsageError("no inventory given", where=where, hint="diloco plan INVENTORY, or first: diloco init")
    return run_path.parent / named
