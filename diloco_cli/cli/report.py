"""`diloco report`: a run as a page, a picture or a table that can be shown to others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from diloco_cli.cli.export import refuse_place, writing_to
from diloco_cli.cli.output import print_json, progress
from diloco_cli.cli.run_argument import OpenRun, RunArgument, open_run
from diloco_cli.clock import utc_now_text
from diloco_cli.errors import UsageError
from diloco_cli.plots import require_matplotlib

if TYPE_CHECKING:
    from diloco_cli.report.history import RunHistory
    from diloco_cli.report.numbers import Report

Format = Literal["html", "svg", "csv"]
FORMATS: tuple[Format, ...] = ("html", "svg", "csv")


def report(
    run: str | None = RunArgument,
    output: Path = typer.Option(None, "-o", "--output", metavar="FILE", help="Default: NAME.html, .svg or .csv here."),
    form: str = typer.Option(None, "--format", help="html, svg or csv. Default: by the file's name, else html."),
    yes: bool = typer.Option(False, "-y", "--yes", help="Overwrite an existing file."),
    as_json: bool = typer.Option(
        False, "--json", help="One JSON object with the report's numbers; no file without -o."
    ),
) -> None:
    """Write what a run was, or is so far, as one HTML file (or pictures, or a table), from the bucket alone.

    HTML and SVG need matplotlib: pip install 'diloco[report]'."""
    chosen = _format(form, output)
    if output is not None:
        refuse_place(output, hint="give another file, or -y to overwrite it", overwrite=yes)
    if chosen != "csv" and not (as_json and output is None):
        require_matplotlib()
    opened = open_run(run)
    path = output if output is not None or as_json else Path(f"{opened.name}.{chosen}")
    if path is not None and output is None:
        refuse_place(path, hint="give another file with -o, or -y to overwrite it", overwrite=yes)
    found, history = read_report(opened)
    if path is not None:
        with writing_to(path):
            path.write_text(_written(chosen, found, history), encoding="utf-8")
    if as_json:
        import msgspec

        print_json("report", msgspec.to_builtins(found) | {"file": None if path is None else str(path)})
    else:
        print(f"{path}: run {found.run}, {found.state}, commits {found.first_commit} to {found.last_commit}")


def _format(form: str | None, output: Path | None) -> Format:
    wanted = form or ("html" if output is None else output.suffix.lower().removeprefix("."))
    chosen = next((known for known in FORMATS if known == wanted), None)
    if chosen is None:
        what = f"unknown format {wanted!r}" if wanted else f"no format is known for {output}"
        raise UsageError(f"{what}; allowed: {', '.join(FORMATS)}", hint="diloco report --format html -o report.html")
    return chosen


def read_report(opened: OpenRun) -> tuple[Report, RunHistory]:
    from diloco_cli.report.history import marks_of, read_history
    from diloco_cli.report.numbers import read_launch_plan, report_of

    facts = opened.facts()
    with progress("reading the log") as shown:

        def tell(done: int, of: int) -> None:
            shown.share = lambda: done / of

        history = read_history(opened.store, opened.format, facts.state, tell)
    marks = marks_of(history, facts.written)
    return report_of(facts, history, read_launch_plan(opened.store), marks, opened.local()), history


def _written(form: Format, found: Report, history: RunHistory) -> str:
    if form == "csv":
        from diloco_cli.report.history import csv_of

        return csv_of(history)
    from diloco_cli.report.page import charts_of, page_of, poster_svg

    charts = charts_of(found, history)
    return poster_svg(found, charts) if form == "svg" else page_of(found, charts, utc_now_text())
