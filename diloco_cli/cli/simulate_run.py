"""`diloco simulate run`: a whole run in virtual time, with faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli.output import print_json, progress
from diloco_cli.cli.run_argument import open_run
from diloco_cli.clock import monotonic_s
from diloco_cli.config.codec import to_plain
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.paths import templates_directory
from diloco_cli.units import format_duration, parse_duration

if TYPE_CHECKING:
    from diloco_cli.cli.run_argument import OpenRun
    from diloco_cli.faults.scenario import Injection, Scenario
    from diloco_cli.forecast.fleet import Hardware, SimulatedFleet
    from diloco_cli.forecast.run import Price
    from diloco_cli.plan.plan import Plan
    from diloco_cli.protocol.log.records import RunFormat
    from diloco_cli.protocol.rules.capacity import SyncerMachine

DEFAULT_SLOTS = 300  # where neither the command nor a scenario says how long
MAX_DAYS = 30.0
OF_AN_EXISTING_RUN = (
    "a run that exists says neither how often its hardware fails nor what it costs: no failures, no prices; the plan "
    "or run file that it was launched from says both"
)
SCENARIOS = "chaos"  # the folder of built-in ones, under templates


@dataclass(frozen=True)
class _Subject:
    """What is simulated, and what is known of it."""

    run: RunFormat
    hardware: dict[str, Hardware]
    prices: dict[str, Price]
    not_charged: tuple[str, ...]
    warnings: tuple[str, ...]
    slot_s: float
    machine: SyncerMachine
    plan: Plan | None
    folder: Path


def run(
    subject: str = typer.Argument(..., metavar="PLAN|RUN", help="A plan file, a run file, or an existing run."),
    scenario: str = typer.Option(None, "--scenario", help="Faults: a scenario file, or a built-in one's name."),
    duration: str = typer.Option(None, "--for", help="Virtual time, such as 2 h; else the scenario's, or 300 slots."),
    seed: int = typer.Option(None, "--seed", min=0, help="Of failures and faults. Default: the scenario's, or 0."),
    timetable_only: bool = typer.Option(False, "-n", "--dry-run", help="Only print the faults' timetable."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """What a run would do: goodput, participation, stalls, bytes, money. Nothing is trained.

    The run's own syncer and learners' books decide, on a simulated bucket, over the links, with the latencies and the
    failures that the inventory states (an existing run states none), and with the faults of a scenario on top.
    """
    found = _subject(subject)
    story = _scenario(scenario)
    faults, number = _faults(story, found, seed)
    if timetable_only:
        _print_timetable(faults, json)
        return
    seconds = _seconds(duration, story, found)
    from diloco_cli.forecast.run import report, simulated

    started_s = monotonic_s()
    with progress("simulating") as shown:

        def watch(fleet: SimulatedFleet) -> None:
            shown.share = lambda: min(1.0, fleet.world.now_s / seconds)

        fleet = simulated(found.run, found.hardware, faults, number, seconds, found.machine, watch)
    warnings = (*found.warnings, *_warnings(story, faults, number))
    outcome = report(fleet, found.prices, found.not_charged, warnings)
    wall_s = monotonic_s() - started_s
    if json:
        data = {**to_plain(outcome), "seed": number, "wall_s": wall_s}
        print_json("simulate run", data, warnings=data.pop("warnings"))
        return
    from diloco_cli.cli.simulate_view import run_text

    print(run_text(outcome, number, wall_s))


def _subject(text: str) -> _Subject:
    """A file is planned as `launch` would plan it; anything else names a run that exists."""
    from diloco_cli.forecast.run import hardware_of_plan, not_charged, prices_of_plan, run_of_plan
    from diloco_cli.plan.syncer_pace import machine_of

    path = Path(text)
    if path.is_file():
        from diloco_cli import __version__
        from diloco_cli.launch.plan_files import read_plan

        plan = read_plan(path, [])
        made = run_of_plan(plan, "simulated", __version__)
        return _Subject(
            made, hardware_of_plan(plan), prices_of_plan(plan), not_charged(plan), (), plan.schedule.slot_s,
            machine_of(plan.inventory.store), plan, path.parent,
        )  # fmt: skip
    if text.endswith((".json", ".yaml", ".yml")):
        raise NotFoundError("no such plan or run file", where=text, hint=f"diloco plan INVENTORY -o {text}")
    return _of_existing(open_run(text))


def _of_existing(opened: OpenRun) -> _Subject:
    from diloco_cli.config.settings import StoreSettings
    from diloco_cli.forecast.run import with_links
    from diloco_cli.launch.plan_files import as_used_here
    from diloco_cli.observe.limits import machine_of_syncer
    from diloco_cli.plan.syncer_pace import machine_of

    run, guess = with_links(opened.format, opened.url), machine_of(as_used_here(StoreSettings(opened.url)))
    machine, source = machine_of_syncer(opened.facts(most_batches=0), guess)
    slot_s = min(i.local_steps * i.step_s for i in run.islands) / run.num_fragments
    return _Subject(run, {}, {}, (), (OF_AN_EXISTING_RUN, source), slot_s, machine, None, Path())


def _scenario(text: str | None) -> Scenario | None:
    from diloco_cli.faults.scenario import load_scenario

    if text is None:
        return None
    if Path(text).is_file():
        return load_scenario(text)
    folder = templates_directory() / SCENARIOS
    built_in = sorted(path.stem for path in folder.glob("*.yaml"))
    if text not in built_in:
        raise NotFoundError(f"no scenario {text!r}; built in: {', '.join(built_in)}", hint="--scenario FILE.yaml")
    return load_scenario(folder / f"{text}.yaml")


def _faults(story: Scenario | None, found: _Subject, seed: int | None) -> tuple[tuple[Injection, ...], int]:
    from diloco_cli.faults.scenario import timetable
    from diloco_cli.forecast.fleet import refuse_impossible_faults, units_of

    number = seed if seed is not None else story.seed if story is not None else 0
    faults = () if story is None else timetable(story, units_of(found.run), number)
    refuse_impossible_faults(faults)
    return faults, number


def _warnings(story: Scenario | None, faults: tuple[Injection, ...], seed: int) -> Iterator[str]:
    """What of a scenario is not simulated."""
    if story is None:
        return
    if not faults:
        yield f"{story.name}: with seed {seed} no fault falls into its {format_duration(story.duration_s)}"
    if story.hypotheses or story.abort:
        yield f"{story.name}: not checked here: {'; '.join((*story.hypotheses, *story.abort))}"


def _seconds(duration: str | None, story: Scenario | None, found: _Subject) -> float:
    if duration is None:
        return story.duration_s if story is not None else DEFAULT_SLOTS * found.slot_s
    seconds = parse_duration(duration)
    if not 0 < seconds <= MAX_DAYS * 86_400:
        raise UsageError(f"--for must be above 0 and at most {MAX_DAYS:g} d", hint="--for '2 h'")
    return seconds


def _print_timetable(faults: tuple[Injection, ...], json: bool) -> None:
    if json:
        print_json("simulate run", {"faults": [to_plain(fault) for fault in faults]})
    else:
        print("\n".join(fault.describe() for fault in faults) or "no faults")
