"""`diloco simulate bandwidth`: Gbit/s that a link needs for a compute utilisation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from diloco_cli.cli.output import print_json
from diloco_cli.errors import UsageError
from diloco_cli.units import parse_count, parse_duration

if TYPE_CHECKING:
    from diloco_cli.forecast.bandwidth import BandwidthRow
    from diloco_cli.plan.plan import Plan, PlannedIsland

FITTED_NOTE = (
    "In percent: the difference to the published figure (arXiv 2604.21428, table 13; 5B parameters, a ring). "
    "The published decoupled rows are reproduced by H = 100, P = 18 (both fitted) and tau = 2; the setting that the "
    "publication names, H = P = 24, needs more and stands below them."
)
ONE_SITE_NOTE = "One site: nothing travels."
OF_AN_ISLAND = ("name", "up_mbps_needed", "up_mbps_available", "down_mbps_needed", "down_mbps_available")
OF_A_MODEL = ("step", "sites", "every", "fragments", "overlap")


class BandwidthAnswer(NamedTuple):
    rows: list[BandwidthRow]
    note: str
    data: dict[str, Any]


def bandwidth(
    context: typer.Context,
    parameters: str = typer.Option(None, "--parameters", help="Of your own model, such as 5B."),
    step: str = typer.Option("1 s", "--step", help="An inner step's time."),
    sites: int = typer.Option(2, "--sites", min=1, max=10_000, help="Places between which the data travels."),
    every: int = typer.Option(24, "--every", min=1, max=100_000, help="H: steps of a round."),
    fragments: int = typer.Option(24, "--fragments", min=1, max=10_000, help="P: fragments of the model."),
    overlap: int = typer.Option(2, "--overlap", min=0, help="tau: steps between sending and needing a fragment."),
    plan: Path = typer.Option(None, "--plan", metavar="PLAN", help="Your own run: a file written by `diloco plan -o`."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """The link that a compute utilisation needs, data-parallel against decoupled.

    Without options: the published table with the difference per cell. With --parameters or --plan: yours.
    """
    _refuse_what_would_be_ignored(context, parameters, plan)
    if plan is not None:
        answer = _of_plan(plan)
    elif parameters is not None:
        answer = _of_options(parameters, step, sites, every, fragments, overlap)
    else:
        answer = _published()
    if json:
        print_json("simulate bandwidth", {"rows": [asdict(row) for row in answer.rows], **answer.data})
        return
    from diloco_cli.cli.simulate_view import bandwidth_text

    print(bandwidth_text(answer.rows))
    print("\n" + "\n".join(fill(line, 80) for line in answer.note.split("\n")))


def _refuse_what_would_be_ignored(context: typer.Context, parameters: str | None, plan: Path | None) -> None:
    given = [f"--{name}" for name in OF_A_MODEL if _is_given(context, name)]
    if plan is not None:
        given = ["--parameters"] * (parameters is not None) + given
        if given:
            raise UsageError("--plan says model, islands and schedule", hint=f"leave out {', '.join(given)}")
    elif given and parameters is None:
        verb = "needs" if len(given) == 1 else "need"
        raise UsageError(f"{', '.join(given)} {verb} a model of your own", hint="add --parameters 5B")


def _is_given(context: typer.Context, name: str) -> bool:
    """Compared by name: the type of a parameter's source is none of what typer offers in all of its releases."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _published() -> BandwidthAnswer:
    from diloco_cli.forecast.bandwidth import FITTED, published_rows

    setting = {"sync_every": FITTED.sync_every, "fragments": FITTED.fragments, "overlap": FITTED.overlap}
    data = {"constants": {**setting, **_constants()}, "fitted": ["sync_every", "fragments", "buckets"]}
    return BandwidthAnswer(published_rows(), f"{FITTED_NOTE} Data-parallel: {_buckets()}.", data)


def _constants() -> dict[str, float]:
    """Of the data-parallel rows."""
    from diloco_cli.forecast.bandwidth import BUCKETS
    from diloco_cli.plan.goodput import BACKWARD_SHARE

    return {"buckets": BUCKETS, "backward_share": BACKWARD_SHARE}


def _buckets() -> str:
    return f"{_constants()['buckets']} equal buckets of gradients (fitted)"


def _of_options(parameters: str, step: str, sites: int, every: int, fragments: int, overlap: int) -> BandwidthAnswer:
    from diloco_cli.forecast.bandwidth import Exchange, rows_of
    from diloco_cli.plan.link import CODEC_BITS

    count, step_s = parse_count(parameters), parse_duration(step)
    if count <= 0:
        raise UsageError("--parameters must be above 0", hint="--parameters 5B")
    if step_s <= 0:
        raise UsageError("--step must be above 0", hint="--step '1 s'")
    if overlap >= every:
        raise UsageError(
            f"--overlap {overlap} must be below --every {every}: a fragment is back before it is sent again",
            hint=f"--overlap {every - 1}",
        )
    rows = rows_of(count, sites, step_s, Exchange(every, fragments, overlap), CODEC_BITS)
    note = f"A ring over the sites, in steady state. Data-parallel: {_buckets()}." if sites > 1 else ONE_SITE_NOTE
    return BandwidthAnswer(rows, note, {"constants": _constants(), "fitted": ["buckets"]})


def _of_plan(path: Path) -> BandwidthAnswer:
    """Rows, and what each island has."""
    from diloco_cli.forecast.bandwidth import rows_of_plan
    from diloco_cli.plan.plan_file import load_plan

    plan = load_plan(path)
    lines = [_plan_note(plan), *map(_island_line, plan.islands)]
    islands = [{field: getattr(island, field) for field in OF_AN_ISLAND} for island in plan.islands]
    planned = {"codec": plan.schedule.codec, "weights_codec": plan.schedule.weights_codec}
    data = {"islands": islands, "planned": planned, "constants": _constants(), "fitted": ["buckets"]}
    return BandwidthAnswer(rows_of_plan(plan), "\n".join(lines), data)


def _plan_note(plan: Plan) -> str:
    from diloco_cli.forecast.bandwidth import exchange_of_plan

    schedule, share = plan.schedule, exchange_of_plan(plan).embedding_share
    alone = f"; the embedding is one fragment, {100 * share:.0f} % of the model" if share else ""
    return (
        f"Planned: {schedule.codec} up, {schedule.weights_codec} down (sync.weights_codec). Through a bucket: every "
        f"fragment up one link and down one, both equally full, {schedule.overlap} slots of overlap{alone}. Quorum, "
        "merging and records come on top; what an island needs is the mean flow. Data-parallel: a ring over the "
        f"{len(plan.islands)} islands, {_buckets()}."
    )


def _island_line(island: PlannedIsland) -> str:
    def side(way: str, available: float | None, needed: float) -> str:
        have = "unknown" if available is None else f"{available / 1000:.3g} Gbit/s"
        return f"{have} {way}, needs {needed / 1000:.3g}"

    up = side("up", island.up_mbps_available, island.up_mbps_needed)
    down = side("down", island.down_mbps_available, island.down_mbps_needed)
    return f"{island.name}: has {up}; {down}"
