"""From the files that a user names to a plan: the same way for `plan` and for `launch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diloco_cli.cli.output import talk

if TYPE_CHECKING:
    from diloco_cli.plan.plan import Goal, Plan


def plan_of_files(inventory: Path | None, file: Path | None, overrides: list[str], goal: Goal | None = None) -> Plan:
    """The plan of an inventory and a run file. The inventory named wins over the run file's own; without a run file
    the template is planned. What the run file does not pin is searched."""
    from diloco_cli.cli.model_probe import facts_of
    from diloco_cli.config.impossible import refuse_together
    from diloco_cli.config.inventory_file import load_inventory
    from diloco_cli.config.run_file import load_run_with_origins
    from diloco_cli.plan.planner import make_plan

    run_path = file or _template_run()
    run, origins = load_run_with_origins(run_path, overrides)
    inventory_path = inventory or _inventory_of(run.inventory, file)
    islands, facts = load_inventory(inventory_path), facts_of(run, run_path.parent)
    refuse_together(run, origins, islands, facts.num_tensors, str(run_path), facts.sequence)
    return make_plan(run, islands, facts, goal, origins)


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
