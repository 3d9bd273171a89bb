"""`diloco simulate bandwidth`: Gbit/s that a link needs for a compute utilisation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.output import print_json

if TYPE_CHECKING:
    from diloco_cli.simulate.bandwidth import Row

FITTED_NOTE = (
    "In percent: the difference to the published figure (arXiv 2604.21428, table 13; 5B parameters, a ring). "
    "The published decoupled rows are reproduced by H = 100, P = 18, tau = 2, which is fitted; the setting that the "
    "publication names, H = P = 24, needs more and stands below them."
)


def bandwidth(
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
    from dataclasses import asdict

    from diloco_cli.cli.simulate_view import bandwidth_text
    from diloco_cli.simulate.bandwidth import published_rows

    extra: dict[str, Any] = {}
    if plan is not None:
        rows, extra, note = _of_plan(plan)
    elif parameters is not None:
        rows, note = _of_options(parameters, step, sites, every, fragments, overlap), ""
    else:
        rows, note = published_rows(), FITTED_NOTE
    if json:
        print_json("simulate bandwidth", {"rows": [asdict(row) for row in rows], **extra})
        return
    from textwrap import fill

    print(bandwidth_text(rows))
    if note:
        print("\n" + "\n".join(fill(line, 80) for line in note.split("\n")))


def _of_options(parameters: str, step: str, sites: int, every: int, fragments: int, overlap: int) -> list[Row]:
    from diloco_cli.errors import UsageError
    from diloco_cli.plan.link import CODEC_BITS
    from diloco_cli.simulate.bandwidth import Exchange, rows_of
    from diloco_cli.units import parse_count, parse_duration

    step_s = parse_duration(step)
    if step_s <= 0:
        raise UsageError("--step must be above 0", hint="--step '1 s'")
    if overlap >= every:
        raise UsageError(
            f"--overlap {overlap} must be below --every {every}: a fragment is back before it is sent again"
        )
    exchange = Exchange(every, fragments, overlap)
    return rows_of(parse_count(parameters), sites, step_s, exchange, CODEC_BITS)


def _of_plan(path: Path) -> tuple[list[Row], dict[str, Any], str]:
    """Rows at the fastest island's step, and what each island has."""
    from diloco_cli.plan.link import CODEC_BITS
    from diloco_cli.plan.plan_file import load_plan
    from diloco_cli.simulate.bandwidth import Exchange, rows_of

    plan = load_plan(path)
    schedule = plan.schedule
    step_s = schedule.round_s / schedule.sync_every
    steps_per_slot = schedule.sync_every / schedule.fragments
    overlap = max(1, round(schedule.overlap * steps_per_slot))
    exchange = Exchange(schedule.sync_every, schedule.fragments, overlap, hops=2)
    rows = rows_of(plan.model.parameters, len(plan.islands), step_s, exchange, CODEC_BITS)
    islands = [
        {
            "name": island.name,
            "up_mbps_needed": island.up_mbps_needed,
            "up_mbps_available": island.up_mbps_available,
            "down_mbps_needed": island.down_mbps_needed,
            "down_mbps_available": island.down_mbps_available,
        }
        for island in plan.islands
    ]
    lines = [
        f"Through a bucket: every fragment up and down one link each, {schedule.overlap} slots of overlap; "
        f"{schedule.codec} is planned. Data-parallel: a ring over the {len(plan.islands)} islands."
    ]
    for island in plan.islands:
        have = "unknown" if island.up_mbps_available is None else f"{island.up_mbps_available / 1000:.3g} Gbit/s"
        lines.append(f"{island.name}: has {have} up, needs {island.up_mbps_needed / 1000:.3g} in steady state")
    return rows, {"islands": islands}, "\n".join(lines)
