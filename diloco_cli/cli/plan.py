"""`diloco plan`: an inventory and a run -> islands, a schedule and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.arguments import OpenRun, open_run
from diloco_cli.cli.output import print_json, progress, talk
from diloco_cli.config.codec import to_plain
from diloco_cli.errors import UsageError
from diloco_cli.plots import save_svg
from diloco_cli.units import parse_count, parse_duration, parse_price

if TYPE_CHECKING:
    from diloco_cli.forecast.fleet import SimulatedFleet
    from diloco_cli.launch.plan_files import Resolved
    from diloco_cli.plan.calibrate import MeasuredRun
    from diloco_cli.plan.plan import Goal, Plan
    from diloco_cli.protocol.log.metrics import MergeNote

DIFFERS_STATUS = 10
OBJECTIVES = ("tokens", "cost")
MAX_BEFORE_A_MERGE = 100  # commits that are looked through for the first merge


def plan(
    inventory: Path = typer.Argument(None, help="The inventory, or a run file, which names its inventory."),
    file: Path | None = typer.Option(None, "-f", "--file", help="The run file; else run.yaml here, or the template."),
    output: Path = typer.Option(
        None, "-o", "--output", help="Write the plan here, for `diloco launch`; into a folder: named after its content."
    ),
    diff: Path = typer.Option(None, "--diff", help="Show how this plan differs from an earlier one."),
    overrides: list[str] = typer.Option([], "--set", help="Change one value of the run file: key.key=value."),
    objective: str = typer.Option("tokens", help="What to search for: tokens (per second) or cost (per token)."),
    budget: str = typer.Option(None, help="All money at most: 150/h, or 20k/run."),
    deadline: str = typer.Option(None, help="Days to the target at most: '30 d'."),
    calibrate: str = typer.Option(None, metavar="RUN", help="Compare with what a run measured, and plan with that."),
    simulate: bool = typer.Option(
        False, "--simulate", help="Confirm it: the run's own syncer and learners, and failures, in virtual time."
    ),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Everything that is known of the plan."),
    explain: bool = typer.Option(False, "--explain", help="Every number with its formula and its inputs."),
    plot: Path = typer.Option(None, metavar="FILE.svg", help="Draw the waterfall."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Plan islands, schedule and predictions for the hardware of INVENTORY."""
    from diloco_cli.launch.plan_files import resolve
    from diloco_cli.plan.plan import load_plan, plan_differences, summary_of

    named, file = _files(inventory, file)
    earlier = load_plan(diff) if diff else None
    goal = _goal(objective, budget, deadline)
    with progress("planning"):
        found = resolve(file, overrides, named, goal, anew=True, tell=talk)
    extra: dict[str, Any] = {}
    if calibrate is not None:
        made, extra["calibration"] = _calibrated(calibrate, found.plan)
        found = replace(found, plan=made, how="made now, by what a run measured", is_kept=False)
    made = found.plan
    warnings = [] if file is None else _checked(made, file.parent)
    if simulate:
        extra |= _confirmed(made)
    if explain:
        from diloco_cli.plan.planner import explain as explanations

        extra["explanations"] = to_plain(explanations(made))
    is_kept = _write(found, output, plot)
    changes = plan_differences(earlier, made) if earlier else []
    if json:
        print_plan(found, extra | ({"changes": changes} if earlier else {}), warnings)
    elif earlier:
        print("\n".join(changes) or "no difference")
        talk(f"against {diff}: {summary_of(changes)}")
    else:
        print(_text(made, extra, verbose))
    for warning in warnings:
        talk(f"warning: {warning}")
    talk(found.told() + (f", kept in {found.place}" if is_kept else ""))
    if changes:
        raise typer.Exit(DIFFERS_STATUS)


def _confirmed(made: Plan) -> dict[str, Any]:
    from diloco_cli.forecast.goodput import simulated
    from diloco_cli.forecast.run import confirmed

    with progress("simulating the run") as shown:

        def watch(fleet: SimulatedFleet, seconds: float) -> None:
            shown.share = lambda: min(1.0, fleet.world.now_s / seconds)

        found = confirmed(made, watch)
    with progress("simulating failures"):
        return {"confirmed": to_plain(found), "simulation": to_plain(simulated(made))}


def print_plan(found: Resolved, extra: dict[str, Any], warnings: Sequence[str] = ()) -> None:
    """The object of `plan --json`, and of `launch -n --json`."""
    from diloco_cli.plan.plan import plan_to_json

    print_json("plan", plan_to_json(found.plan) | extra, warnings=[*found.plan.warnings, *warnings])


def _checked(made: Plan, folder: Path) -> list[str]:
    """Why `launch` would refuse the plan on this machine. Raises what it would refuse on any."""
    from diloco_cli.cli.preflight import Preflight

    found = []
    for error, is_of_here in Preflight(made, folder, loads=False).problems(talk):
        if not is_of_here:
            raise error
        found.append(f"launch would end here: {error}" + (f" ({error.hint})" if error.hint else ""))
    return found


def _files(given: Path | None, file: Path | None) -> tuple[Path | None, Path | None]:
    """The inventory and the run file. Without both: what `diloco init` writes."""
    from diloco_cli.config.fields import kinds_of, read_yaml_file

    if given is not None and file is None and kinds_of(read_yaml_file(given)) == ["run file"]:
        return None, given
    here = Path("run.yaml")
    if given is None and file is None and here.is_file():
        talk(f"planning {here} of this folder")
        return None, here
    return given, file


def _goal(objective: str, budget: str | None, deadline: str | None) -> Goal:
    from diloco_cli.plan.plan import Goal

    if objective not in OBJECTIVES:
        raise UsageError(f"--objective must be one of {', '.join(OBJECTIVES)}, not '{objective}'")
    per_h = total = None
    if budget is not None and budget.endswith("/run"):
        total = float(parse_count(budget.removesuffix("/run")))
    elif budget is not None and budget.endswith("/h"):
        per_h = parse_price(budget)
    elif budget is not None:
        raise UsageError(
            f"--budget '{budget}': write an amount per hour such as 150/h, or for all of it such as 20k/run"
        )
    seconds = None if deadline is None else parse_duration(deadline)
    for name, limit in (("--budget", per_h if total is None else total), ("--deadline", seconds)):
        if limit is not None and limit <= 0:
            raise UsageError(f"{name} must be above 0")
    return Goal("cost" if objective == "cost" else "tokens", per_h, total, seconds)


def _calibrated(run: str, made: Plan) -> tuple[Plan, Any]:
    """The plan made again with the speeds that a run measured, and the comparison."""
    from diloco_cli.plan.calibrate import calibrate
    from diloco_cli.plan.planner import make_plan

    calibration = calibrate(made, measured_run(run))
    again = make_plan(made.run, calibration.inventory, made.model, made.goal)
    return replace(again, settings=made.settings), to_plain(calibration.comparison)


def _write(found: Resolved, output: Path | None, plot: Path | None) -> bool:
    """Whether the plan is kept beside its run."""
    from diloco_cli.launch.plan_files import keep

    made, done = found.plan, keep(found, talk)
    if output is not None:
        from diloco_cli.plan.plan import save_plan

        is_there = done and found.place is not None and output.absolute() == found.place.absolute()
        path = output if is_there else save_plan(made, output)
        talk(f"plan written to {path}; start it: diloco launch {path}")
    if plot is not None:
        from diloco_cli.cli.plan_view import waterfall_svg

        save_svg(plot, lambda: waterfall_svg(made))
        talk(f"waterfall drawn in {plot}")
    return done


def _text(made: Plan, extra: dict[str, Any], verbose: bool) -> str:
    from diloco_cli.cli.plan_view import (
        answer,
        calibration_text,
        confirmed_text,
        details_text,
        explanation_text,
        plan_text,
    )

    parts = ["\n".join(answer(made))] if "explanations" in extra else []
    parts = [details_text(made)] if verbose else parts or [plan_text(made)]
    if "calibration" in extra:
        parts.insert(0, calibration_text(extra["calibration"]))
    if "simulation" in extra:
        from diloco_cli.forecast.goodput import simulation_text

        parts += [confirmed_text(extra["confirmed"]), simulation_text(extra["simulation"])]
    if "explanations" in extra:
        parts.append(explanation_text(extra["explanations"]))
    return "\n\n".join(parts)


def measured_run(text: str) -> MeasuredRun:
    """What a run measured, from its bucket alone; `text`: a name, a run file, a URL. The steady rate counts from the
    run's first merge on. Raises NotFoundError if there is no such run."""
    from diloco_cli.observe.status import rate_between, status_of, wall_seconds
    from diloco_cli.plan.calibrate import MeasuredIsland, MeasuredRun

    opened = open_run(text)
    facts = opened.facts()
    status, merges, first = status_of(facts), facts.state.metrics.recent_merges, _first_merge(opened)
    means = {name: heard.heartbeat.mean_tokens_per_s for name, heard in facts.learners.items()}
    islands = tuple(
        MeasuredIsland(i.name, means.get(i.name, 0.0), i.up_bytes, i.down_bytes, i.incarnation) for i in status.learners
    )
    return MeasuredRun(
        name=status.run,
        wall_s=wall_seconds(facts),
        tokens=status.tokens,
        steady_tokens_per_s=rate_between(first, merges[-1]) if first and merges else None,
        requests=status.store.requests if status.store else 0,
        islands=islands,
    )


def _first_merge(opened: OpenRun) -> MergeNote | None:
    from diloco_cli.protocol.log.commit_log import next_commit
    from diloco_cli.protocol.log.state import RunState

    state = RunState()
    for _ in range(MAX_BEFORE_A_MERGE):
        later = opened.perform(next_commit(opened.format, state))
        if later is None or later.metrics.recent_merges:
            return later.metrics.recent_merges[0] if later else None
        state = later
    return None
