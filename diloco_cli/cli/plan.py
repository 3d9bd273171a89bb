"""`diloco plan`: an inventory and a run -> islands, a schedule and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.arguments import OpenRun, open_run
from diloco_cli.cli.output import print_json, progress, talk
from diloco_cli.cli.plan_choices import (
    Compared,
    compared_text,
    frontier_rows,
    frontier_svg,
    frontier_text,
    rented_entry,
    renting_text,
    rival_rows,
    rivals_text,
)
from diloco_cli.cli.plan_view import (
    answer,
    calibration_text,
    confirmed_text,
    details_text,
    explanation_text,
    labelled,
    plan_text,
    waterfall_svg,
)
from diloco_cli.config.codec import to_plain
from diloco_cli.config.fields import kinds_of, read_yaml_file
from diloco_cli.config.prices import EXAMPLE, load_prices
from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.launch.plan_files import NOT_KEPT, Inputs, Resolved, keep, read_inputs, resolve
from diloco_cli.plan.plan import Goal, Objective, Plan, load_plan, plan_differences, plan_to_json, save_plan, summary_of
from diloco_cli.plan.planner import explain, make_plan, outline, rivals
from diloco_cli.plan.renting import Rental, made, read_wish, renting
from diloco_cli.plots import save_svg
from diloco_cli.protocol.log.commit_log import next_commit
from diloco_cli.protocol.log.keys import offer_key
from diloco_cli.protocol.log.metrics import MergeNote
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, Offer, decode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.merging import is_well_formed
from diloco_cli.quantities import parse_count, parse_duration, parse_price

if TYPE_CHECKING:
    from diloco_cli.forecast.fleet import SimulatedFleet
    from diloco_cli.plan.calibrate import MeasuredRun

DIFFERS_STATUS = 10
OBJECTIVES: tuple[Objective, ...] = ("tokens", "cost", "loss")
RIVALS = 4  # that --simulate tries
MAX_BEFORE_A_MERGE = 100  # commits that are looked through for the first merge


def plan(
    inventory: Path = typer.Argument(None, help="The inventory, or a run file, which names its inventory."),
    file: Path | None = typer.Option(None, "-f", "--file", help="The run file; else run.yaml here, or the template."),
    output: Path = typer.Option(
        None, "-o", "--output", help="Write the plan here, for `diloco launch`; into a folder: named after its content."
    ),
    diff: Path = typer.Option(None, "--diff", help="Show how this plan differs from an earlier one."),
    overrides: list[str] = typer.Option([], "--set", help="Change one value of the run file: key.key=value."),
    objective: str = typer.Option(
        None,
        help="What to search for: tokens (per second), cost (per token) or loss (at the target); else tokens, and cost"
        " with --add and --deadline.",
    ),
    budget: str = typer.Option(None, help="All money at most: 150/h, or 20k/run."),
    deadline: str = typer.Option(None, help="Days to the target at most: '30 d'."),
    add: str = typer.Option(
        None,
        metavar="WHAT",
        help="What to rent: auto (the best for --deadline or --budget), or 'H100:8@REGION x2 spot'.",
    ),
    wanted: list[str] = typer.Option([], "--with", metavar="ISLAND", help="Have it anyhow; without --add: compare."),
    unwanted: list[str] = typer.Option([], "--without", metavar="ISLAND", help="Compare with a plan without it."),
    prices: Path = typer.Option(None, "--prices", help="For --add: a CSV in the shape of SkyPilot's catalogue."),
    calibrate: str = typer.Option(None, metavar="RUN", help="Compare with what a run measured, and plan with that."),
    simulate: bool = typer.Option(
        None,
        "--simulate/--fast",
        help="Confirm it in virtual time at length, or not at all; else briefly, on the screen alone.",
    ),
    shows_frontier: bool = typer.Option(False, "--frontier", help="Time, money, loss: the best plans, a line each."),
    verbose: bool = typer.Option(False, "-v", "--verbose", help="Everything that is known of the plan."),
    explain: bool = typer.Option(False, "--explain", help="Every number with its formula and its inputs."),
    plot: Path = typer.Option(None, metavar="FILE.svg", help="Draw the waterfall; with --frontier: that."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Plan islands, schedule and predictions for the hardware of INVENTORY."""
    _refuse_together(add, wanted, unwanted, prices, calibrate, diff if simulate and not json else None)
    named, file = _files(inventory, file)
    earlier = load_plan(diff) if diff else None
    goal = _goal(objective or ("cost" if add and deadline else "tokens"), budget, deadline)
    goal = replace(goal, with_islands=tuple(wanted), without_islands=tuple(unwanted))
    found, extra = _planned(file, overrides, named, goal, add, prices)
    if calibrate is not None:
        made, extra["calibration"] = _calibrated(calibrate, found.plan)
        found = replace(found, plan=made, how="made now, by what a run measured", is_kept=False)
    made = found.plan
    warnings = [] if file is None or "compared" in extra or "rent" in extra else _checked(made, file.parent)
    extra |= _confirmed(found, simulate, is_screen=not (earlier or explain or shows_frontier or json))
    extra |= {"explanations": _explanations(made)} if explain else {}
    extra |= {"frontier": _frontier(found, goal)} if shows_frontier else {}
    found, is_kept = _write(found, output, plot, extra.get("frontier"))
    changes = _print(found, extra, warnings, earlier, json, verbose, output is not None)
    against = [f"against {diff}: {summary_of(changes)}"] if earlier and not json else []
    for line in (*against, *_told_of(warnings, verbose)):
        talk(line)
    talk(found.told() + (f", kept in {found.place}" if is_kept else ""))
    if changes:
        raise typer.Exit(DIFFERS_STATUS)


def _refuse_together(
    add: str | None,
    wanted: Sequence[str],
    unwanted: Sequence[str],
    prices: Path | None,
    calibrate: str | None,
    silent_diff: Path | None,
) -> None:
    """Before anything takes time. `silent_diff`: with a simulation that it would not show."""
    if add and unwanted:
        hint = "leave it out of the inventory"
        raise UsageError("--add is beside all that the inventory has, --without leaves some of it out", hint=hint)
    if prices and not add:
        raise UsageError("--prices are of what --add rents", hint="--add auto --deadline '3 d'")
    if calibrate is not None and (add or wanted or unwanted):
        hint = "diloco plan --calibrate RUN prints measured speeds, for the inventory"
        raise UsageError("--calibrate makes one plan again, --add, --with and --without compare two", hint=hint)
    if silent_diff is not None:
        hint = f"diloco plan --simulate; or with both: diloco plan --diff {silent_diff} --simulate --json"
        raise UsageError("--diff prints differences alone, and nothing of what --simulate finds", hint=hint)


def _planned(
    file: Path | None, overrides: Sequence[str], named: Path | None, goal: Goal, add: str | None, prices: Path | None
) -> tuple[Resolved, dict[str, Any]]:
    """And what is said beside it: what to rent, two plans compared."""
    if add:
        return _with_rented(read_inputs(file, overrides, named, talk, needs_hardware=False), add, prices, goal)
    if goal.with_islands or goal.without_islands:
        return _compared(read_inputs(file, overrides, named, talk), goal)
    with progress("planning"):
        return resolve(file, overrides, named, goal, anew=True, tell=talk), {}


def _print(
    found: Resolved,
    extra: dict[str, Any],
    warnings: Sequence[str],
    earlier: Plan | None,
    json: bool,
    verbose: bool,
    is_written: bool,
) -> list[str]:
    """The plan, or how it differs from an earlier one; returns that. `is_written`: by -o."""
    changes = plan_differences(earlier, found.plan) if earlier else []
    if json:
        plain: dict[str, Any] = {key: extra[key].plain() for key in ("rent", "compared") if key in extra}

        plain |= {"frontier": frontier_rows(extra["frontier"])} if "frontier" in extra else {}
        plain |= {"rivals": rival_rows(extra["rivals"])} if "rivals" in extra else {}
        print_plan(found, extra | plain | ({"changes": changes} if earlier else {}), warnings)
    else:
        print("\n".join(changes) or "no difference" if earlier else _text(found, extra, verbose, is_written))
    return changes


def _frontier(found: Resolved, goal: Goal) -> list[Plan]:
    """With the hardware of the plan; settings that nobody gave are searched anew."""
    from diloco_cli.plan.frontier import frontier

    made = found.plan

    def planned(each: Goal) -> Plan:
        """The islands that the goal leaves out are in this inventory no more."""
        rest = replace(each, without_islands=())
        return replace(outline(made.run, made.inventory, made.model, rest, found.origins), goal=each)

    with progress("planning for time, money and loss"):
        return frontier(planned, goal)


def _explanations(made: Plan) -> Any:
    return to_plain(explain(made))


def _confirmed(found: Resolved, simulate: bool | None, is_screen: bool) -> dict[str, Any]:
    """By the run's own syncer and learners. What takes long is done where it is asked for alone: more rounds, rivals of
    the plan, a month of failures; None: what is brief, for the screen. Where that takes too long, why not."""
    if simulate is False or not (simulate or is_screen):
        return {}
    from diloco_cli.forecast.outlook import outlook, rivalry
    from diloco_cli.forecast.run import BRIEF, LONG, offers_to_confirm

    made, span, said = found.plan, LONG if simulate else BRIEF, dict[str, Any]()
    offers = offers_to_confirm(made, LONG)
    if offers > LONG.most_offers:
        too_many = f"take {offers:,.0f} simulated offers, more than {LONG.most_offers:,}"
        why = f"{too_many}: the closed form alone says what is merged"
    else:
        why = "" if offers_to_confirm(made, span) <= span.most_offers else "take longer; --simulate does it"
    with progress("simulating the run") as shown:

        def watch(fleet: SimulatedFleet, seconds: float) -> None:
            shown.share = lambda: min(1.0, fleet.world.now_s / seconds)

        if why:
            said["not_confirmed"] = f"{len(made.islands)} islands with {made.schedule.fragments} fragments {why}"
        else:
            confirmed = outlook(made, span, watch)
            said["confirmed"] = to_plain(confirmed)
            if simulate and made.goal.objective != "loss":
                shown.text = "simulating its rivals"
                said["rivals"] = rivalry(made, confirmed, rivals(made, found.origins, RIVALS), span, watch)
    if simulate:
        from diloco_cli.forecast.goodput import simulated

        with progress("simulating failures"):
            said["simulation"] = to_plain(simulated(made))
    return said


def print_plan(found: Resolved, extra: dict[str, Any], warnings: Sequence[str] = ()) -> None:
    """The object of `plan --json`, and of `launch -n --json`."""
    print_json("plan", plan_to_json(found.plan) | extra, warnings=[*found.plan.warnings, *warnings])


def _checked(made: Plan, folder: Path) -> list[str]:
    """Why `launch` would refuse the plan on this machine. Raises what it would refuse on any."""
    from diloco_cli.cli.preflight import Preflight

    found = []
    for error, is_of_here in Preflight(made, folder, loads=False).problems(talk):
        if not is_of_here:
            raise error
        found.append(f"launch would end here: {error}" + (f"{HINTED}{error.hint})" if error.hint else ""))
    return found


HINTED = " (hint: "


def _told_of(warnings: Sequence[str], verbose: bool) -> list[str]:
    """All of them where everything is asked for; else the first, and how many there are."""
    if verbose or len(warnings) < 2:
        return [f"warning: {warning}" for warning in warnings]
    first = warnings[0].partition(HINTED)[0]
    return [f"warning: {first}; and {len(warnings) - 1} more (-v)"]


def _files(given: Path | None, file: Path | None) -> tuple[Path | None, Path | None]:
    """The inventory and the run file. Without both: what `diloco init` writes."""
    if given is not None and file is None and kinds_of(read_yaml_file(given)) == ["run file"]:
        return None, given
    here = Path("run.yaml")
    if given is None and file is None and here.is_file():
        talk(f"planning {here} of this folder")
        return None, here
    return given, file


def _goal(objective: str, budget: str | None, deadline: str | None) -> Goal:
    wanted = next((known for known in OBJECTIVES if known == objective), None)
    if wanted is None:
        raise UsageError(f"--objective must be one of {', '.join(OBJECTIVES)}, not '{objective}'")
    per_h = total = None
    try:
        if budget is not None and budget.endswith("/run"):
            total = float(parse_count(budget.removesuffix("/run")))
        elif budget is not None:
            per_h = parse_price(budget)
    except UsageError:
        forms = "an amount per hour such as 150/h, or for all of it such as 20k/run, without the currency's sign"
        raise UsageError(f"--budget '{budget}': write {forms}") from None
    seconds = None if deadline is None else parse_duration(deadline)
    for name, limit in (("--budget", per_h if total is None else total), ("--deadline", seconds)):
        if limit is not None and limit <= 0:
            raise UsageError(f"{name} must be above 0")
    return Goal(wanted, per_h, total, seconds)


def _compared(asked: Inputs, goal: Goal) -> tuple[Resolved, dict[str, Any]]:
    """The plan with and without the islands of the goal, beside the one that nobody asked for any."""
    with progress("planning what it is compared with"):
        now = asked.planned(replace(goal, with_islands=(), without_islands=()), None)
    with progress("planning"):
        then = asked.planned(goal, None)
    in_it = {island.name for island in now.islands}
    for name in (*goal.with_islands, *goal.without_islands):
        if (name in in_it) == (name in goal.with_islands):
            talk(f"{name} {'takes part' if name in in_it else 'is left out'} already")
    lists = {"with": goal.with_islands, "without": goal.without_islands}
    change = ", ".join(f"{word} {name}" for word, names in lists.items() for name in names)
    how = f"made now for a comparison{NOT_KEPT}"
    return Resolved(then, how, asked.origins, asked.digests), {"compared": Compared(change, now, then)}


def _with_rented(asked: Inputs, add: str, prices: Path | None, goal: Goal) -> tuple[Resolved, dict[str, Any]]:
    """The plan with the best of what can be rented."""
    path = prices or EXAMPLE
    rental = Rental(asked.run, asked.inventory, asked.facts, asked.origins)
    table, wish = load_prices(path, asked.inventory.devices), read_wish(add, asked.inventory.devices)
    for text in table.left_out:
        talk(f"left out: {text}")
    with progress("planning what could be rented"):
        plan, chosen = made(rental, renting(rental, table.listed, wish, goal, str(path)))
    if prices is None:
        talk(f"prices of {path}: they change, look before you rent; others: --prices FILE")
    found = {"rent": chosen} | ({"compared": Compared("with it", chosen.now, plan)} if chosen.proposals else {})
    return Resolved(plan, f"made now with --add{NOT_KEPT}", asked.origins, asked.digests), found


def _calibrated(run: str, made: Plan) -> tuple[Plan, Any]:
    """The plan made again with the speeds that a run measured, and the comparison."""
    from diloco_cli.plan.calibrate import calibrate

    calibration = calibrate(made, measured_run(run))
    again = make_plan(made.run, calibration.inventory, made.model, made.goal)
    return replace(again, settings=made.settings), to_plain(calibration.comparison)


def _write(
    found: Resolved, output: Path | None, plot: Path | None, frontier: Sequence[Plan] | None
) -> tuple[Resolved, bool]:
    """What is said of the plan after that, and whether it is kept beside its run."""
    made, done = found.plan, keep(found, talk)
    if output is not None:
        is_there = done and found.place is not None and output.absolute() == found.place.absolute()
        path = output if is_there else save_plan(made, output)
        talk(f"plan written to {path}; start it: diloco launch {path}")
        found = replace(found, how=found.how.removesuffix(NOT_KEPT))
    if plot is not None:
        save_svg(plot, lambda: frontier_svg(frontier) if frontier else waterfall_svg(made))
        talk(f"{'frontier' if frontier else 'waterfall'} drawn in {plot}")
    return found, done


def _text(found: Resolved, extra: dict[str, Any], verbose: bool, is_written: bool) -> str:
    made, confirmed = found.plan, confirmed_text(found.plan, extra)
    parts = ["\n".join(answer(made, confirmed))] if "explanations" in extra else []
    parts = [details_text(made, confirmed)] if verbose else parts
    if "frontier" in extra:
        said = [] if parts or not confirmed else [labelled({"confirmed": confirmed})]
        parts += [frontier_text(extra["frontier"]), *said]
    start = "diloco launch" if found.place else "diloco launch FILE" if is_written else "-o FILE, diloco launch FILE"
    parts = parts or [plan_text(made, confirmed, start)]
    if "rent" in extra:
        parts = [renting_text(extra["rent"], extra.get("compared")), *parts, rented_entry(extra["rent"])]
    elif "compared" in extra:
        parts.insert(0, compared_text(extra["compared"]))
    if "calibration" in extra:
        parts.insert(0, calibration_text(extra["calibration"]))
    if "simulation" in extra:
        from diloco_cli.forecast.goodput import simulation_text

        parts += [rivals_text(made, extra["rivals"])] if "rivals" in extra else []
        parts.append(simulation_text(extra["simulation"]))
    if "explanations" in extra:
        parts.append(explanation_text(extra["explanations"]))
    return "\n\n".join(filter(None, parts))


def measured_run(text: str) -> MeasuredRun:
    """What a run measured, from its bucket alone; `text`: a name, a run file, a URL. The steady rate counts from the
    run's first merge on. Raises NotFoundError if there is no such run."""
    from diloco_cli.cli.simulate import start_ups_of
    from diloco_cli.observe.status import rate_between, status_of, wall_seconds
    from diloco_cli.plan.calibrate import MeasuredIsland, MeasuredRun

    opened = open_run(text)
    facts = opened.facts()
    status, merges, first = status_of(facts), facts.state.metrics.recent_merges, _first_merge(opened)
    means = {name: heard.heartbeat.mean_tokens_per_s for name, heard in facts.learners.items()}
    down = start_ups_of(opened.store, facts.written, ("ended",))
    islands = tuple(
        MeasuredIsland(
            i.name,
            means.get(i.name, 0.0),
            i.up_bytes,
            i.down_bytes,
            i.incarnation,
            *_exchange(opened, facts.state, i.name),
            down.of(i.name, 1),
        )
        for i in status.learners
    )
    return MeasuredRun(
        name=status.run,
        wall_s=wall_seconds(facts),
        tokens=status.tokens,
        steady_tokens_per_s=rate_between(first, merges[-1]) if first and merges else None,
        requests=status.store.requests if status.store else 0,
        islands=islands,
    )


def _exchange(opened: OpenRun, state: RunState, name: str) -> tuple[float, float, float]:
    """(bytes of a mean delta, seconds to send it, seconds from its merge's commit to its adoption), as an island's
    newest offer that has an outcome says; zeros if there is none, it is deleted, or nobody honest wrote it."""
    known, layout = state.learner(name), opened.format.layout
    key = offer_key(name, known.floor, known.next_seq - 1)
    data = opened.store.get(key, MAX_RECORD_BYTES) if known.next_seq else None
    try:
        offer = None if data is None else decode(Offer, data, key)
    except DilocoError:
        offer = None
    if offer is None or not is_well_formed(offer) or offer.fragment >= len(layout.fragments):
        return 0.0, 0.0, 0.0
    share = layout.num_parameters / len(layout.fragments) / layout.fragments[offer.fragment].num_parameters
    return offer.payload_bytes * share, offer.timings.upload_s, offer.timings.adoption_s


def _first_merge(opened: OpenRun) -> MergeNote | None:
    state = RunState()
    for _ in range(MAX_BEFORE_A_MERGE):
        later = opened.perform(next_commit(opened.format, state))
        if later is None or later.metrics.recent_merges:
            return later.metrics.recent_merges[0] if later else None
        state = later
    return None
