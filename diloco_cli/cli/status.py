"""`diloco status`: the run at a glance, from the bucket alone: once, again and again (--watch), or as metrics (--serve,
--textfile)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from diloco_cli.cli.arguments import LOOK_S, OpenRun, RunArgument, boxed, open_run
from diloco_cli.cli.output import console, print_json, report_error, screen_width, talk, writing_to
from diloco_cli.clock import sleep_s
from diloco_cli.config.codec import to_plain
from diloco_cli.engines.port import Job, JobState
from diloco_cli.errors import INTERRUPTED_STATUS, DegradedError, NotFoundError, StoreError, UsageError
from diloco_cli.observe.facts import RunFacts
from diloco_cli.observe.situation import OVER, SILENCE, TROUBLE, State
from diloco_cli.observe.situation import starts as has_not_merged
from diloco_cli.observe.status import Status, status_of
from diloco_cli.paths import write_whole
from diloco_cli.protocol.actors.requests import stop_stands
from diloco_cli.protocol.log.metrics import Metrics
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.quantities import some_of
from diloco_cli.store.port import StoreForbiddenError, StoreGoneError
from diloco_cli.store.retry import is_retryable
from diloco_cli.store.wrappers import Deadline

BATCHES_A_LOOK = 256  # of events: enough for what is recent
Tell = Callable[[str], None]


def awaited_run(run: str | None, box: Deadline, every_s: float) -> OpenRun:
    """The run, once it exists. The person may watch before it is launched."""
    waits = False
    while True:
        box.restart(LOOK_S)
        try:
            return open_run(run, box)
        except (NotFoundError, StoreError) as error:
            absent = isinstance(error, NotFoundError | StoreGoneError)
            if not absent and not (waits and isinstance(error, StoreError) and is_retryable(error)):
                raise
            if run is None and isinstance(error, StoreGoneError):
                raise
            if not waits:
                talk(f"{error}: waiting for it (Ctrl-C ends)")
            waits = True
        sleep_s(every_s)


def read_status(
    opened: OpenRun, known: RunState | None = None, ask: Callable[[], list[Job]] | None = None
) -> tuple[Status, RunState]:
    """`known` is the state returned by the call before: then only what is new is read. `ask`: for its jobs, of a run
    that goes on."""
    facts = opened.facts(known, BATCHES_A_LOOK)
    return told_with_jobs(opened, facts, ask), facts.state


def told_with_jobs(opened: OpenRun, facts: RunFacts, ask: Callable[[], list[Job]] | None) -> Status:
    current = status_of(facts, opened.local())
    if _is_resumed(opened, facts):  # no process has said so yet: its jobs may wait for hours
        current = replace(current, state=State.STARTING, reason="resumed, and no syncer serves it yet", since_s=None)
    return current if ask is None or current.state in OVER else with_jobs(current, facts, ask())


def _is_resumed(opened: OpenRun, facts: RunFacts) -> bool:
    """Of a stopped run: whether it goes on as soon as a syncer serves it. Requests lie in the home bucket alone, and
    not everybody may read them."""
    if facts.state.phase != RunPhase.STOPPED or opened.url != opened.format.home_of(opened.url):
        return False
    with suppress(StoreForbiddenError):
        return not opened.perform(stop_stands(opened.format, facts.state))
    return False


def with_jobs(current: Status, facts: RunFacts, jobs: list[Job]) -> Status:
    """A run that waits for its jobs to start has not stalled; one whose learners' jobs have all failed before anything
    was heard of them would wait for ever. A learner that is heard may have a job that is not known here, but a job of
    it that was killed will not come back, whatever it said last."""
    from diloco_cli.cli.jobs import WAITS

    heard = {learner.name for learner in current.learners if learner.state not in SILENCE}
    jobs = [job for job in jobs if job.state is not JobState.GONE or job.id or job.unit not in heard]
    waits = [f"{job.unit} ({job.why or job.state})" for job in jobs if job.state in WAITS]
    learners = {learner.name for learner in current.learners}
    is_resumed = current.state is State.STARTING and facts.state.phase == RunPhase.STOPPED
    may_serve = facts.run.settings.syncer.on_learners
    if is_resumed and any(job.lives and (may_serve or job.unit not in learners) for job in jobs):
        current = replace(current, hint="")
    if waits and has_not_merged(facts) and (is_resumed or current.state in (State.SILENT, State.STALLED)):
        current = replace(current, state=State.STARTING, reason=f"jobs wait: {some_of(waits)}", hint="")
    unheard = {learner.name for learner in current.learners if learner.heard_s is None}
    is_served = current.syncer is not None and current.syncer.heard_s is not None
    silent = unheard if is_served else unheard | {job.unit for job in jobs} - learners
    failed = {job.unit: job for job in jobs if job.state is JobState.FAILED and job.unit in silent}
    if learners and learners <= failed.keys():
        first = failed[min(learners)]
        reason = f"the jobs of all learners have failed: {first.unit} ({first.why})"
        current = replace(current, state=State.FAILED, reason=reason, hint="")
    running = {job.unit for job in jobs if job.state is JobState.RUNNING}
    if current.state is State.SILENT and learners and learners <= running - unheard:  # no resume would change that
        reason = f"{current.reason}; yet their jobs run: is this machine's clock ahead of the store's?"
        current = replace(current, reason=reason, hint=f"diloco doctor {facts.url}")
    if failed and not current.hint:  # submitted again they would end alike
        first_name = min(learners & failed.keys(), default=min(failed))
        current = replace(current, hint=f"diloco logs {first_name} --run {facts.url}")
    killed = {job.unit for job in jobs if job.id and job.state in (JobState.FAILED, JobState.GONE)} - unheard
    lost = killed.union(job.unit for job in jobs if not job.lives and job.unit not in learners)
    if lost and not current.hint:  # not heard for a while, or of its syncers, of which another one serves
        current = replace(current, hint=f"diloco resume {facts.url}")
    if (began := running & unheard) and not current.hint:  # why a unit cannot reach the bucket its log alone tells
        current = replace(current, hint=f"diloco logs {min(began)} --run {facts.url}")
    return replace(current, jobs=jobs)


@contextmanager
def riding_out(what: str, tell: Tell = talk) -> Iterator[None]:
    """For one look of many: where the store does not answer now, that is told, and the next look may find more. Raises
    what no later look can mend, such as a bucket that is gone."""
    try:
        yield
    except StoreError as error:
        if not is_retryable(error):
            raise
        tell(f"{what}: {error}")


class Watcher:
    """One look after the other, each with a time limit of its own; each reads only what is new. `metrics`: those of the
    last look that the store answered. `on_jobs` takes what an engine says of the run's jobs."""

    metrics: Metrics

    def __init__(self, opened: OpenRun, box: Deadline, on_jobs: Callable[[list[Job], str], None] | None = None) -> None:
        from diloco_cli.cli.jobs import JobWatch

        self._opened, self._box = opened, box
        self._known: RunState | None = None
        self.jobs = JobWatch(opened, on_jobs)

    def look(self) -> Status:
        self._box.restart(LOOK_S)
        current, self._known = read_status(self._opened, self._known, self.jobs.look)
        self.metrics = self._known.metrics
        return current


def watch(opened: OpenRun, box: Deadline, every_s: float, as_json: bool) -> Status:
    """The last status: of a run that has ended. If the store does not answer, the first look ends with an error; a
    later one keeps the last status and tells why, because the person who watches wants to see when it answers again."""
    from diloco_cli.cli.jobs import JobNews

    if sys.stdout.isatty() and not as_json:
        return _watch_live(Watcher(boxed(opened, box), box), every_s)
    return _watch_lines(Watcher(opened, box, None if as_json else JobNews([], talk)), every_s, as_json)


def _watch_lines(watcher: Watcher, every_s: float, as_json: bool) -> Status:
    from diloco_cli.observe.screen import plain_line

    current = watcher.look()
    while True:
        print_json("status", to_plain(current)) if as_json else print(plain_line(current), flush=True)
        if current.state in OVER:
            return current
        sleep_s(every_s)
        with riding_out("status"):
            current = watcher.look()


def _watch_live(watcher: Watcher, every_s: float) -> Status:
    from rich.live import Live

    from diloco_cli.observe.screen import Curves, LiveScreen

    trouble: list[str] = []
    current, curves = watcher.look(), Curves()
    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            curves.add(watcher.metrics)
            live.update(
                LiveScreen(current, curves, " ".join(filter(None, [*trouble, watcher.jobs.trouble]))), refresh=True
            )
            if current.state in OVER:
                return current
            sleep_s(every_s)
            trouble.clear()
            with riding_out("status", trouble.append):
                current = watcher.look()


WATCH_EVERY_S = 1.0
SHORTEST_WATCH_S = 0.2
SERVES_AT, ADDRESS = "127.0.0.1:9464", re.compile(r"([^/:]+:|\[[0-9a-fA-F:]+\]:)?\d+")


class WatchCommand(TyperCommand):
    """Lets `--watch` stand without its number, which typer alone does not. The context has no type here, because
    typer's releases take its base class from different packages."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_interval(args))


def with_interval(words: list[str]) -> list[str]:
    """`-w` and `--watch` without a number behind them, and `--serve` without an address, get the usual one."""
    found: list[str] = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        found.append(word)
        if word in ("-w", "--watch") and not _is_number(following):
            found.append(str(WATCH_EVERY_S))
        if word == "--serve" and not ADDRESS.fullmatch(following):
            found.append(SERVES_AT)
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


REGISTRATION = {"status": {"cls": WatchCommand}}


def status(
    run: str | None = RunArgument,
    watch: float | None = typer.Option(None, "-w", "--watch", metavar="[S]", help="Refresh every S seconds (1)."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object (with --watch: one a line)."),
    exit_code: bool = typer.Option(False, "--exit-code", help="Exit 5 if it is DEGRADED, STALLED, SILENT or FAILED."),
    serve: str | None = typer.Option(
        None, "--serve", metavar="[HOST:PORT]", help=f"Serve metrics to Prometheus, with a token ({SERVES_AT})."
    ),
    textfile: Path | None = typer.Option(
        None, "--textfile", metavar="FILE", help="Write metrics for node_exporter (with --watch: every S seconds)."
    ),
) -> None:
    """Show the run at a glance, read from the bucket alone."""
    box = Deadline(LOOK_S)
    every_s = None if watch is None else max(SHORTEST_WATCH_S, watch)
    try:
        if serve is not None or textfile is not None:
            _metrics(run, box, serve, textfile, every_s)
            return
        current = None if every_s is None else _watched(run, box, every_s, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_STATUS) from None
    trouble = ""
    if current is None:
        watcher = Watcher(open_run(run, box), box)
        current, trouble = watcher.look(), watcher.jobs.trouble
    error = None
    if exit_code and current.state in TROUBLE:
        error = DegradedError(f"run {current.run} is {current.state}: {current.reason}", hint=current.hint or None)
    if watch is None and as_json:
        print_json("status", to_plain(current), warnings=[*warnings_of(current), *filter(None, [trouble])], error=error)
    elif watch is None:
        _print(current)
        if trouble:
            talk(trouble)
    if error is not None:
        if not as_json:
            report_error(error)
        raise typer.Exit(error.exit_status)


def _watched(run: str | None, box: Deadline, every_s: float, as_json: bool) -> Status:
    """The run's last status; its summary is printed where the screen was."""

    opened = awaited_run(run, box, every_s)
    current = watch(opened, box, every_s, as_json)
    if not as_json:
        from diloco_cli.observe.summary import summary_of, summary_text

        box.restart(LOOK_S)
        print(summary_text(summary_of(opened.facts(), opened.local()), screen_width()))
    return current


def _metrics(run: str | None, box: Deadline, serve: str | None, textfile: Path | None, every_s: float | None) -> None:

    if serve is not None and textfile is not None:
        raise UsageError("--serve and --textfile are two ways", hint="run one command for each")
    waits = serve is not None or every_s is not None
    opened = awaited_run(run, box, WATCH_EVERY_S) if waits else open_run(run, box)
    if serve is not None:
        serve_metrics(opened, box, serve)
    elif textfile is not None:
        write_metrics(opened, box, textfile, every_s)


def clock_warnings(current: Status) -> list[str]:
    if current.clock_skew_s is None:
        return []
    where = "ahead of" if current.clock_skew_s > 0 else "behind"
    return [f"the store's clock is {abs(current.clock_skew_s):.0f} s {where} this machine's: ages follow the store's"]


def warnings_of(current: Status) -> list[str]:
    return [
        *clock_warnings(current),
        *([current.partial] if current.partial else []),
        *([current.divergence] if current.divergence else []),
        *([f"garbage: {current.garbage.note}"] if current.garbage and current.garbage.note else []),
    ]


def _print(current: Status) -> None:
    from diloco_cli.observe.screen import status_lines, status_text, styled

    if sys.stdout.isatty():
        screen = console()
        screen.print(styled(status_lines(current, screen.width)), crop=False, overflow="ignore")
    else:
        print(status_text(current))
    for warning in clock_warnings(current):
        talk(f"warning: {warning}")


READABLE = 0o644  # node_exporter is another user


def serve_metrics(opened: OpenRun, box: Deadline, address: str) -> None:
    """Until Ctrl-C, also when the run has ended: what scrapes may come later."""
    from diloco_cli.metrics.prometheus import MetricsServer, address_of, metrics_text, token_of

    watcher = Watcher(boxed(opened, box), box)
    host, port = address_of(address)
    token, path = token_of(opened.url)
    try:
        server = MetricsServer((host, port), token, lambda: metrics_text(watcher.look()))
    except OSError as error:
        raise UsageError(f"cannot listen: {error.strerror or error}", where=f"{host}:{port}") from error
    with server:
        url = f"http://{host}:{server.server_port}/metrics"
        talk(f"metrics of run {opened.name}: {url}, with the bearer token in {path}")
        server.serve_forever()


def write_metrics(opened: OpenRun, box: Deadline, path: Path, every_s: float | None) -> None:
    """Once, or every so often until the run ends. The file appears whole or not at all."""
    from diloco_cli.metrics.prometheus import metrics_text

    watcher = Watcher(boxed(opened, box), box)
    while True:
        with riding_out("status") if every_s is not None else nullcontext():
            status = watcher.look()
            with writing_to(path):
                write_whole(path, metrics_text(status), READABLE)
            if every_s is None or status.state in OVER:
                return
        sleep_s(every_s)
