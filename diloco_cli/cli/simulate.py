"""`diloco simulate`: what would happen, in virtual time: goodput, bandwidth, whole runs. It never trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli import __version__
from diloco_cli.cli.arguments import OpenRun, open_run
from diloco_cli.cli.output import print_json, progress, talk
from diloco_cli.cli.simulate_view import (
    bandwidth_text,
    goodput_plot,
    goodput_text,
    mixed_text,
    run_text,
    scavenged_text,
)
from diloco_cli.clock import monotonic_s
from diloco_cli.config.codec import replace, to_plain
from diloco_cli.config.settings import StoreSettings
from diloco_cli.errors import NotFoundError, UsageError
from diloco_cli.events.event import Event
from diloco_cli.faults import Injection, Scenario, find_scenario, timetable
from diloco_cli.forecast.bandwidth import BUCKETS, FITTED, Exchange, published_rows, rows_of
from diloco_cli.forecast.uneven import (
    MixedRow,
    ScavengedRow,
    mixed_constants,
    mixed_rows,
    scavenged_constants,
    scavenged_rows,
)
from diloco_cli.plan.candidates import BACKWARD_SHARE
from diloco_cli.plan.link import CODEC_BITS, machine_of
from diloco_cli.plots import save_svg
from diloco_cli.protocol.log.keys import EPOCHS, SYNCER, claims_prefix
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.rules.capacity import SyncerMachine
from diloco_cli.quantities import format_duration, parse_count, parse_duration, parse_time
from diloco_cli.store.open import answers
from diloco_cli.store.port import Store

if TYPE_CHECKING:
    from diloco_cli.forecast.chips import Constants
    from diloco_cli.forecast.fleet import Hardware, SimulatedFleet, StartUps
    from diloco_cli.forecast.goodput import GoodputRow
    from diloco_cli.forecast.run import Price

GRID_DAYS, GRID_SEEDS = 2.0, 3
FLEET_DAYS, FLEET_SEEDS = 30.0, 1
CELLS = 30  # of the published table
CLAIMS = 4  # of each unit, the newest
MAX_CHIPS, MAX_LEARNERS, MAX_DAYS, MAX_SEEDS = 100_000_000, 1024, 366.0, 100

FITTED_NOTE = (
    "In percent: the difference to the published figure (arXiv 2604.21428, table 13; 5B parameters, a ring). "
    "The published decoupled rows are reproduced by H = 100, P = 18 (both fitted) and tau = 2; the setting that the "
    "publication names, H = P = 24, needs more and stands below them."
)
OF_A_FAILING_FLEET = ("chips", "learners", "mtbi", "repair", "days", "seed", "seeds", "plot")
OF_A_MODEL = ("step", "sites", "every", "fragments", "overlap")
DEFAULT_SLOTS = 300  # where neither the command nor a scenario says how long
MAX_RUN_DAYS = 30.0
OF_AN_EXISTING_RUN = (
    "a run that exists says neither how often its hardware fails nor what it costs: no failures, no prices; the plan "
    "or run file that it was launched from says both"
)

simulate = typer.Typer(
    help="What would happen, in virtual time: goodput, bandwidth, whole runs. It never trains.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@simulate.command("goodput")
def goodput(
    context: typer.Context,
    chips: str = typer.Option(None, "--chips", help="Chips of the whole fleet, such as 1.2M."),
    learners: int = typer.Option(None, "--learners", min=1, max=MAX_LEARNERS, help="Learners that share them."),
    mtbi: str = typer.Option(None, "--mtbi", help="Mean time between interrupts of one chip, such as 365 d."),
    repair: str = typer.Option(None, "--repair", help="Mean time until a failed slice is back, such as 60 s."),
    days: float = typer.Option(None, "--days", min=0.01, max=MAX_DAYS, help="Simulated days of each history."),
    seed: int = typer.Option(0, "--seed", min=0, help="The first history's seed."),
    seeds: int = typer.Option(None, "--seeds", min=1, max=MAX_SEEDS, help="Histories of each cell."),
    plot: Path = typer.Option(None, "--plot", metavar="FILE", help="Write a picture (SVG) here."),
    mixed: bool = typer.Option(False, "--mixed", help="Instead: of learners on two kinds of hardware."),
    scavenge: bool = typer.Option(False, "--scavenge", help="Instead: the time with more learners for half of a run."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Goodput and uptime of a failing fleet: decoupled learners, data-parallel beside them.

    Without options: the table of arXiv 2604.21428 (its chips, its learners), with the difference per cell; --mixed and
    --scavenge: its tables of mixed hardware and of scavenged capacity. For the islands of your own plan: diloco plan
    --simulate.
    """
    if mixed or scavenge:
        _print_uneven(context, mixed, scavenge, json)
        return
    own, constants = chips is not None or learners is not None, _constants(mtbi, repair)
    days = days or (FLEET_DAYS if own else GRID_DAYS)
    numbers = list(range(seed, seed + (seeds or (FLEET_SEEDS if own else GRID_SEEDS))))
    started_s = monotonic_s()
    if own:
        rows = _own_fleet(1_200_000 if chips is None else parse_count(chips), learners or 8, constants, days, numbers)
    else:
        rows = _published_grid(constants, days, numbers)
    data = {
        "rows": [asdict(row) for row in rows],
        "goodput_meaning": "share of the allocated chip time that is spent on steps that count",
        "days": days,
        "seed": seed,
        "seeds": numbers,
        **_constants_data(constants, own_mtbi=mtbi is not None, own_repair=repair is not None),
        "wall_s": monotonic_s() - started_s,
    }
    if plot is not None:
        save_svg(plot, lambda: goodput_plot(rows))
        talk(f"plot written to {plot}")
    if json:
        print_json("simulate goodput", data)
    else:
        print(goodput_text(rows, data))


def _own_fleet(chips: int, learners: int, constants: Constants, days: float, seeds: Sequence[int]) -> list[GoodputRow]:
    from diloco_cli.forecast.chips import equal_learners
    from diloco_cli.forecast.goodput import all_methods

    if not learners <= chips <= MAX_CHIPS:
        raise UsageError(
            f"--chips {chips} is out of range: from one per learner ({learners}) to {MAX_CHIPS:,}",
            hint="diloco simulate goodput --chips 1.2M --learners 8",
        )
    with progress("simulating"):
        return list(all_methods(equal_learners(chips, learners, constants), chips, constants, days, seeds))


def _published_grid(constants: Constants, days: float, seeds: Sequence[int]) -> list[GoodputRow]:
    from diloco_cli.forecast.goodput import published_grid

    rows: list[GoodputRow] = []
    with progress("simulating") as shown:
        shown.share = lambda: len(rows) / CELLS
        rows.extend(published_grid(constants, days, seeds))
    return rows


def _print_uneven(context: typer.Context, mixed: bool, scavenge: bool, json: bool) -> None:
    """The published table of mixed hardware, or that of scavenged capacity."""
    if mixed and scavenge:
        raise UsageError("--mixed and --scavenge are two tables", hint="diloco simulate goodput --mixed")
    given = [f"--{name}" for name in OF_A_FAILING_FLEET if _is_given(context, name)]
    if given:
        table = "--mixed" if mixed else "--scavenge"
        raise UsageError(
            f"{table} is a published table without failures, and takes no {', '.join(given)}",
            hint=f"diloco simulate goodput {table}",
        )
    if not json:
        print(mixed_text(mixed_rows()) if mixed else scavenged_text(scavenged_rows()))
        return
    rows: Sequence[MixedRow | ScavengedRow] = mixed_rows() if mixed else scavenged_rows()
    constants = mixed_constants() if mixed else scavenged_constants()
    print_json("simulate goodput", {"rows": [asdict(row) for row in rows], "constants": constants, "fitted": []})


def _constants(mtbi: str | None, repair: str | None) -> Constants:
    from diloco_cli.forecast.goodput import PUBLISHED

    constants = PUBLISHED
    if mtbi is not None:
        constants = replace(constants, mtbi_s=_positive("--mtbi", parse_duration(mtbi)))
    if repair is not None:
        mean_s = _positive("--repair", parse_duration(repair))
        constants = replace(constants, repair=constants.repair.with_mean(mean_s))
    return constants


def _positive(option: str, seconds: float) -> float:
    if seconds <= 0:
        raise UsageError(f"{option} must be above 0", hint=f"{option} '60 s'")
    return seconds


def _constants_data(constants: Constants, own_mtbi: bool, own_repair: bool) -> dict[str, Any]:
    """The constants that entered, and which of them are fitted: neither published, nor the user's own."""
    repair = constants.repair
    named = {
        "mtbi_s": constants.mtbi_s,
        "step_s": constants.step_s,
        "down_s": constants.down_s,
        "up_s": constants.up_s,
        "slice_chips": constants.slice_chips,
        "repair_scale_s": repair.scale_s,
        "repair_shape": repair.shape,
        "repair_exponent": repair.exponent,
        "repair_mean_s": repair.mean_s,
    }
    given = [*(["mtbi_s"] if own_mtbi else []), *(["repair_scale_s", "repair_mean_s"] if own_repair else [])]
    fitted = [name for name in named if name != "mtbi_s" and name not in given]
    return {"constants": named, "fitted": fitted, "given": given}


@simulate.command("bandwidth")
def bandwidth(
    context: typer.Context,
    parameters: str = typer.Option(None, "--parameters", help="Of your own model, such as 5B."),
    step: str = typer.Option("1 s", "--step", help="An inner step's time."),
    sites: int = typer.Option(2, "--sites", min=1, max=10_000, help="Places between which the data travels."),
    every: int = typer.Option(24, "--every", min=1, max=100_000, help="H: steps of a round."),
    fragments: int = typer.Option(24, "--fragments", min=1, max=10_000, help="P: fragments of the model."),
    overlap: int = typer.Option(2, "--overlap", min=0, help="tau: steps between sending and needing a fragment."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """The link that a compute utilisation needs, data-parallel against decoupled.

    Without options: the published table with the difference per cell. With --parameters: yours. What the islands of a
    plan need and have: diloco plan.
    """
    constants: dict[str, float] = {"buckets": BUCKETS, "backward_share": BACKWARD_SHARE}
    buckets = f"Data-parallel: {BUCKETS} equal buckets of gradients (fitted)."
    if parameters is None:
        given = [f"--{name}" for name in OF_A_MODEL if _is_given(context, name)]
        if given:
            verb = "needs" if len(given) == 1 else "need"
            raise UsageError(f"{', '.join(given)} {verb} a model of your own", hint="add --parameters 5B")
        setting = {"sync_every": FITTED.sync_every, "fragments": FITTED.fragments, "overlap": FITTED.overlap}
        rows, note, constants = published_rows(), f"{FITTED_NOTE} {buckets}", setting | constants
        fitted = ["sync_every", "fragments", "buckets"]
    else:
        count, step_s = parse_count(parameters), _positive("--step", parse_duration(step))
        if count <= 0:
            raise UsageError("--parameters must be above 0", hint="--parameters 5B")
        if overlap >= every:
            raise UsageError(
                f"--overlap {overlap} must be below --every {every}: a fragment is back before it is sent again",
                hint=f"--overlap {every - 1}",
            )
        rows = rows_of(count, sites, step_s, Exchange(every, fragments, overlap), CODEC_BITS)
        note = f"A ring over the sites, in steady state. {buckets}" if sites > 1 else "One site: nothing travels."
        fitted = ["buckets"]
    if json:
        data = {"rows": [asdict(row) for row in rows], "constants": constants, "fitted": fitted}
        print_json("simulate bandwidth", data)
        return

    print(f"{bandwidth_text(rows)}\n\n{fill(note, 80)}")


def _is_given(context: typer.Context, name: str) -> bool:
    """Compared by name: the type of a parameter's source is none of what typer offers in all of its releases."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


@dataclass(frozen=True)
class Subject:
    """What is simulated, and what is known of it."""

    run: RunFormat
    hardware: dict[str, Hardware]
    prices: dict[str, Price]
    not_charged: tuple[str, ...]
    warnings: tuple[str, ...]
    slot_s: float
    machine: SyncerMachine
    starts: StartUps


@simulate.command("run")
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
    story = None if scenario is None else find_scenario(scenario)
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

        fleet = simulated(found.run, found.hardware, faults, number, seconds, found.machine, watch, found.starts)
    warnings = (*found.warnings, *_warnings(story, faults, number))
    outcome = report(fleet, found.prices, found.not_charged, warnings)
    wall_s = monotonic_s() - started_s
    if json:
        data = {**to_plain(outcome), "seed": number, "wall_s": wall_s}
        print_json("simulate run", data, warnings=data.pop("warnings"))
        return

    print(run_text(outcome, number, wall_s))


def _subject(text: str) -> Subject:
    """A file is planned as `launch` would plan it; anything else names a run that exists."""
    from diloco_cli.forecast.fleet import StartUps
    from diloco_cli.forecast.run import hardware_of_plan, not_charged, prices_of_plan, run_of_plan

    path = Path(text)
    if path.is_file():
        from diloco_cli.launch.plan_files import resolve

        found = resolve(path, tell=talk)
        talk(found.told())
        plan = found.plan
        made = run_of_plan(plan, "simulated", __version__)
        return Subject(
            made,
            hardware_of_plan(plan),
            prices_of_plan(plan),
            not_charged(plan),
            (),
            plan.schedule.slot_s,
            machine_of(plan.inventory.store),
            StartUps(),
        )
    if text.endswith((".json", ".yaml", ".yml")):
        raise NotFoundError("no such plan or run file", where=text, hint=f"diloco plan INVENTORY -o {text}")
    return of_existing(open_run(text))


def of_existing(opened: OpenRun) -> Subject:
    """Its islands are as fast as they have said last, if they have."""
    from diloco_cli.forecast.run import with_links
    from diloco_cli.launch.plan_files import as_used_here
    from diloco_cli.observe.situation import machine_of_syncer

    run, guess = with_links(opened.format, opened.url), machine_of(as_used_here(StoreSettings(opened.url)))
    facts = opened.facts()
    machine, source = machine_of_syncer(facts, guess)
    rates = {name: heard.heartbeat.tokens_per_s for name, heard in facts.learners.items()}
    islands = [
        replace(island, step_s=island.batch_tokens / rates[island.name]) if rates.get(island.name) else island
        for island in run.islands
    ]
    run = replace(run, islands=tuple(islands))
    slot_s = min(i.local_steps * i.step_s for i in islands) / run.num_fragments
    starts = start_ups_of(opened.store, facts.written)
    shown = ", ".join(f"{name} {format_duration(starts.of(name, 1) or 0.0)}" for name in sorted(starts.seen))
    own = [f"killed units take as long as this run's own to start: {shown}"] * bool(shown)
    return Subject(run, {}, {}, (), (OF_AN_EXISTING_RUN, source, *own), slot_s, machine, starts)


def start_ups_of(store: Store, written: Sequence[Event], kinds: Sequence[str] = ("started", "restarted")) -> StartUps:
    """From events of these kinds until the unit claims its place, as the run's events and its units' newest claims show
    it."""
    from diloco_cli.forecast.fleet import start_ups

    started: dict[str, list[float]] = {}
    for event in written:
        if event.kind in kinds:
            started.setdefault(event.unit, []).append(parse_time(event.time) or 0.0)
    claimed = {}
    for name in started:
        keys = store.list(EPOCHS if name == SYNCER else claims_prefix(name, 0))[-CLAIMS:]
        claimed[name] = [stat.modified_s for stat in answers(store.stat, keys) if stat is not None]
    return start_ups(started, claimed)


def _faults(story: Scenario | None, found: Subject, seed: int | None) -> tuple[tuple[Injection, ...], int]:
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
    if story.hypotheses:
        yield f"{story.name}: checked by `diloco chaos run`, not here: {'; '.join(story.hypotheses)}"


def _seconds(duration: str | None, story: Scenario | None, found: Subject) -> float:
    if duration is None:
        return story.duration_s if story is not None else DEFAULT_SLOTS * found.slot_s
    seconds = parse_duration(duration)
    if not 0 < seconds <= MAX_RUN_DAYS * 86_400:
        raise UsageError(f"--for must be above 0 and at most {MAX_RUN_DAYS:g} d", hint="--for '2 h'")
    return seconds


def _print_timetable(faults: tuple[Injection, ...], json: bool) -> None:
    if json:
        print_json("simulate run", {"faults": [to_plain(fault) for fault in faults]})
    else:
        print("\n".join(fault.describe() for fault in faults) or "no faults")
