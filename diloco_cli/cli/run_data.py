"""What a run was: `diloco verify` replays its log, `diloco report` makes a page, a picture or a table of it, and
`diloco wandb` feeds it to Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from diloco_cli.cli.arguments import (
    AllowStore,
    JsonOption,
    OpenRun,
    RunArgument,
    foreground_store,
    head_of,
    named_here,
    open_run,
)
from diloco_cli.cli.jobs import JobWatch
from diloco_cli.cli.output import print_json, progress, refuse_place, talk, writing_to
from diloco_cli.cli.status import riding_out, told_with_jobs
from diloco_cli.clock import sleep_s, utc_now_text
from diloco_cli.config.hardware import MEANS, data_class_of
from diloco_cli.errors import INTERRUPTED_STATUS, DataCheckError, StoreError, TryAgainError, UsageError
from diloco_cli.metrics.wandb_feed import Feed, start_wandb
from diloco_cli.observe.mirror_check import MirrorCheck, check_mirror
from diloco_cli.plots import require_matplotlib
from diloco_cli.report.history import RunHistory, csv_of, marks_of, read_history
from diloco_cli.report.numbers import Report, read_launch_plan, report_of
from diloco_cli.report.page import charts_of, mark_of, page_of, poster_svg
from diloco_cli.runtime.consent import consented, signing_secret, trust_of
from diloco_cli.runtime.registry import run_directory
from diloco_cli.signing import short_key

if TYPE_CHECKING:
    from diloco_cli.observe.replay import Replay

SHOWN = 5


def verify(
    run: str | None = RunArgument,
    mirrors: bool = typer.Option(False, "--mirrors", help="Compare the buckets of regions with the home bucket, too."),
    allow_store: list[str] = AllowStore,
    as_json: bool = JsonOption,
) -> None:
    """Replay the commit log from the bucket alone and compare every digest. A run without a commit: exit 75."""
    if allow_store and not mirrors:
        raise UsageError("--allow-store is for the buckets of regions", hint="add --mirrors")
    opened = open_run(run)
    if mirrors:
        consented(opened.format, opened.url, named_here([], allow_store), opened.format.region_urls, code=False)
    found, islands = _verified(opened), head_of(opened).with_members(opened.format).all_islands
    loops = {island.name: data for island in islands if (data := data_class_of(island.infra)) is not None}
    if found.ok and not found.commits:
        hint = f"see whether its syncer works: diloco status {opened.word}"
        raise TryAgainError(f"nothing to verify: run {opened.name} has no commit yet", where=opened.url, hint=hint)
    warnings = unpinned(opened)
    regions = check_mirrors(opened) if mirrors else []
    broken = None if found.ok else disagreement(found, opened.url)
    error = broken or next((mirror_error(region) for region in regions if not region.ok), None)
    if as_json:
        facts = {"run": opened.name, **asdict(found), "missing": len(found.missing), "missing_keys": found.missing}
        facts |= {"own_loops": loops}
        facts |= {"mirrors": [asdict(region) | {"ok": region.ok} for region in regions]} if mirrors else {}
        print_json("verify", facts | {"ok": error is None}, warnings=warnings, error=error)
        if error is not None:
            raise typer.Exit(error.exit_status)
        return
    counted = f"{found.commits} commits, {found.merges} merges, {found.epochs} epochs, {found.tokens:,} tokens"
    print(f"run {opened.name}: {counted}, {found.offers_applied} offers applied, {found.offers_rejected} not used")
    if found.floor:
        print(f"commits 0 to {found.floor}: chain and rules; states and deltas of then may have been collected")
        later = f"{found.floor + 1} to {found.commits - 1}"
        print(f"commits {later}: replayed, from the versions as of commit {found.floor}")
    print(trust_of(opened.format))
    for data, meaning in MEANS.items():
        names = sorted(name for name, its in loops.items() if its == data)
        if names:
            print(f"own loops, {data} data: {', '.join(names)}: {meaning}")
    for region in regions:
        late = f", {region.behind} commits behind" if region.behind else ""
        print(f"region {region.region}: {region.commits} commits{late}, {region.objects} objects compared")
    for warning in warnings:
        talk(f"warning: {warning}")
    if error is not None:
        raise error
    print("ok: the replay gives bit-identical outer parameters; nothing missing, nothing applied twice")


def problem_of(opened: OpenRun) -> str:
    """What `verify` finds; nothing if all is well."""
    found = _verified(opened)
    return "" if found.ok else disagreement(found, opened.url).message


def _verified(opened: OpenRun) -> Replay:
    from diloco_cli.observe.replay import verified

    with progress(f"replaying the log of {opened.name}") as shown:
        commits = head_of(opened).n + 1

        def watch(found: Replay) -> None:
            shown.share = lambda: min(1.0, found.commits / commits) if commits else None

        return verified(opened.store, opened.format, watch)


def unpinned(opened: OpenRun) -> list[str]:
    """A warning if it is only FORMAT.json that says whose signatures count."""
    signing = opened.format.signing
    if signing is None or signing_secret() is not None:
        return []
    named = short_key(signing.operator)
    return [f"signatures were checked with the operator's key {named} that FORMAT.json names; no key here confirms it"]


def check_mirrors(opened: OpenRun) -> list[MirrorCheck]:
    run, found = head_of(opened).with_members(opened.format), []
    for region in run.regions:
        try:
            there = foreground_store(region.url)
        except StoreError as error:
            found.append(MirrorCheck(region.name, region.url, unreachable=str(error)))
        else:
            found.append(check_mirror(run, region, opened.store, there))
    return found


def mirror_error(found: MirrorCheck) -> DataCheckError | StoreError:
    """Exit 11 for other bytes, 6 for a bucket that could not be read."""
    if found.unreachable:
        return StoreError(f"region {found.region} could not be compared: {found.unreachable}", where=found.url)
    return DataCheckError(
        f"region {found.region} does not follow the home bucket: {_first(found.mismatches, found.unlisted)}",
        where=found.url,
        hint="find out who wrote them; then delete those objects in the region's bucket and start the syncer again",
    )


def _first(problems: Sequence[str], unlisted: int = 0) -> str:
    more = len(problems) + unlisted - SHOWN
    return "; ".join(problems[:SHOWN]) + (f" (and {more} more)" if more > 0 else "")


def disagreement(found: Replay, url: str) -> DataCheckError:
    """The first few problems as one error (exit 11)."""
    problems = [*(f"missing: {key}" for key in found.missing), *found.mismatches]
    problems += [f"{found.duplicates} offers applied twice"] if found.duplicates else []
    return DataCheckError(
        f"the bucket does not agree with its log: {_first(problems, found.unlisted)}",
        where=url,
        hint="see them: diloco verify RUN --json",
    )


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
        hint = "give another file with -o, or -y to overwrite it"
        refuse_place(path, hint, overwrite=yes or _is_page_of(path, opened.format.run_id))
    found, history = read_report(opened)
    if path is not None:
        with writing_to(path):
            path.write_text(_written(chosen, found, history, opened.format.run_id), encoding="utf-8")
    if as_json:
        import msgspec

        print_json("report", msgspec.to_builtins(found) | {"file": None if path is None else str(path)})
    else:
        print(f"{path}: run {found.run}, {found.state}, {found.commits} commits")


def _format(form: str | None, output: Path | None) -> Format:
    wanted = form or ("html" if output is None else output.suffix.lower().removeprefix("."))
    chosen = next((known for known in FORMATS if known == wanted), None)
    if chosen is None:
        what = f"unknown format {wanted!r}" if wanted else f"no format is known for {output}"
        raise UsageError(f"{what}; allowed: {', '.join(FORMATS)}", hint="diloco report --format html -o report.html")
    return chosen


def read_report(opened: OpenRun) -> tuple[Report, RunHistory]:
    facts = opened.facts()
    with progress("reading the log") as shown:

        def tell(done: int, of: int) -> None:
            shown.share = lambda: done / of

        history = read_history(opened.store, opened.format, facts.state, tell)
    marks = marks_of(history, facts.written)
    status = told_with_jobs(opened, facts, (watch := JobWatch(opened)).look)
    if watch.trouble:
        talk(watch.trouble)
    return report_of(facts, history, read_launch_plan(opened.store), marks, status), history


def _is_page_of(path: Path, run_id: str) -> bool:
    """Whether an earlier report wrote it, which this one brings up to date."""
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as page:
        return mark_of(run_id) in page.read(1000)
    return False


def _written(form: Format, found: Report, history: RunHistory, run_id: str) -> str:
    if form == "csv":
        return csv_of(history)

    charts = charts_of(found, history)
    return poster_svg(found, charts) if form == "svg" else page_of(found, charts, utc_now_text(), run_id)


EVERY_S = 5.0


def wandb(
    run: str | None = RunArgument,
    project: str = typer.Option("diloco", "--project", help="W&B's project."),
    entity: str | None = typer.Option(None, "--entity", help="W&B's entity; without it, your default."),
    offline: bool = typer.Option(False, "--offline", help="Only write files here, for `wandb sync`."),
    once: bool = typer.Option(False, "--once", help="Send what there is, and end; else go on until the run ends."),
) -> None:
    """Send a run's loss and pace to Weights & Biases: one W&B run, whose steps are commits, however often this
    starts."""
    opened = open_run(run)
    folder = run_directory(opened.url) / "wandb"
    started = start_wandb(opened.format, project, entity, offline, folder)
    feed = Feed(started, opened.format, opened.store, 0 if offline else started.step)
    status = 0
    try:
        with progress(f"sending run {opened.name} to W&B, until it ends"):
            if once:
                feed.send()
            else:
                feed_to_the_end(feed)
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
    finally:
        started.finish(exit_code=0)
    talk(f"run {opened.name}: commits up to {feed.next - 1} are in {'the files here' if offline else 'W&B'}")
    if offline:
        talk(f"hint: wandb sync {folder}/wandb/offline-run-*")
    raise typer.Exit(status)


def feed_to_the_end(feed: Feed) -> None:
    """A run takes days, and its store may be away for minutes of them."""
    is_over = False
    while not is_over:
        with riding_out("wandb"):
            is_over = feed.send()
        if not is_over:
            sleep_s(EVERY_S)
