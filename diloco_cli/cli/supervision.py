"""What `launch` and `resume` end in: units of a run start on this machine, and are watched until the run ends here. The
person in front of it is told what happens, and so is the bucket, as events; with who killed what was killed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from diloco_cli.chaos.actions import read_entries
from diloco_cli.cli.arguments import LOOK_S, OpenRun, boxed, head_of, open_known_run, operator_of
from diloco_cli.cli.hooks import HookCaller, Hooks
from diloco_cli.cli.jobs import MAX_ASKED, JobNews, hasten, jobs_before, submit_missing
from diloco_cli.cli.output import print_json, screen_width, talk
from diloco_cli.cli.status import Watcher
from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.engines.port import Job
from diloco_cli.errors import INTERRUPTED_STATUS, DilocoError, RefusedError
from diloco_cli.events.bucket import EventWriter
from diloco_cli.events.event import KINDS
from diloco_cli.observe.facts import RunFacts
from diloco_cli.observe.screen import Curves, LiveScreen, job_lines, plain_line
from diloco_cli.observe.status import Status
from diloco_cli.observe.summary import summary_of, summary_text
from diloco_cli.observe.unit_states import ENDED, syncer_lost_after_s, working
from diloco_cli.protocol.actors.joining import refuse_beside_living
from diloco_cli.protocol.actors.progress import phase_for
from diloco_cli.protocol.actors.requests import is_at_rest
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.quantities import format_duration
from diloco_cli.runtime.consent import NamedHere, consented, stores_of, trust_of
from diloco_cli.runtime.processes import is_started_by_diloco
from diloco_cli.runtime.registry import (
    SUPERVISOR,
    Resuming,
    UnitRecord,
    known_at,
    living_supervisor,
    log_path,
    note_line,
    note_resuming,
    place_data,
    read_unit,
    refuse_supervised,
    run_name,
)
from diloco_cli.runtime.supervisor import (
    ENDINGS,
    StopPolicy,
    SupervisionEvent,
    SupervisionResult,
    WholeRun,
    listed,
    supervise,
)
from diloco_cli.runtime.units import (
    UnitSpec,
    standing_by,
    start_successor,
    starts_elsewhere,
    syncer_may_start,
    units_here,
    units_of,
)
from diloco_cli.store.open import open_store
from diloco_cli.store.port import StoreUnavailableError
from diloco_cli.store.retry import gone_after_s
from diloco_cli.store.wrappers import Deadline
from diloco_cli.syncer.regions import ends_within_s

UNKNOWN = "not by diloco: by a person, or by the kernel for want of memory"
Show = Callable[[SupervisionEvent], None]


@contextmanager
def telling(opened: OpenRun, units: list[UnitSpec], show: Show) -> Iterator[Show]:
    """What takes the events of a supervision of these units. Where one of them serves the run, the home bucket is
    in reach; else the syncer carries them there from the region's own bucket."""
    serves = syncer_may_start(opened.format, units)
    url = opened.format.home_of(opened.url) if serves else opened.url
    teller = Teller(opened.url, url, [unit.name for unit in units], show)
    try:
        yield teller.tell
    finally:
        teller.close()


class Teller:
    """Takes the events of a supervision. `units`: those that it supervises; what concerns all is told of the first."""

    def __init__(self, run_url: str, url: str, units: list[str], show: Show) -> None:
        self._url, self._units, self._show = run_url, units, show
        self._log = None if is_started_by_diloco() else log_path(run_url, SUPERVISOR)
        self._writer = EventWriter(open_store(url))

    def tell(self, event: SupervisionEvent) -> None:
        event = with_killer(event, self._url)
        unit = event.unit or self._units[0]
        kind, told = kind_of(event), event.text
        if event.cause is not None:
            self._writer.note("error", unit, event.cause.text, place_data(event.cause))
            told = told.removeprefix(f"{event.cause.text}; ")
        self._writer.note(kind, unit, f"{KINDS[kind].said}{told}", event.data)
        if self._log is not None:
            with suppress(OSError):
                note_line(self._log, line_of(event))
        self._show(event)

    def close(self) -> None:
        self._writer.close()
        if self._writer.dropped:
            talk(f"{self._writer.dropped} events were not written: {self._writer.trouble or 'the bucket is too slow'}")


def line_of(event: SupervisionEvent) -> str:
    return f"{event.unit or 'run'}: {event.kind}: {event.text}"


def kind_of(event: SupervisionEvent) -> str:
    """The name in KINDS (events/event.py)."""
    if event.kind == "started" and int(event.data.get("start", 1)) > 1:
        return "restarted"
    return "gave_up" if event.kind == "failed" else event.kind


def with_killer(event: SupervisionEvent, url: str) -> SupervisionEvent:
    """The event of an end by a signal, with who sent it: chaos, by its journal on this machine, or somebody else."""
    name = event.data.get("signal")
    if name is None or event.kind == "done":  # an end that this supervisor asked for
        return event
    numbered = enumerate(read_entries(url), start=1)
    sent = [
        number
        for number, entry in numbered
        if (entry.fault, entry.target, entry.pid) == ("kill", event.unit, event.data.get("pid"))
        and entry.injected is not False
    ]
    by = f"chaos #{sent[-1]}" if sent else UNKNOWN
    before, killed, after = event.text.rpartition(f"killed by {name}")  # what the unit itself said stands before it
    text = f"{before}{killed} ({by}){after}" if killed else event.text
    return replace(event, text=text, data={**event.data, "by": f"chaos #{sent[-1]}" if sent else "unknown"})


ENDS_WITHIN_S = 20.0  # a supervisor whose run is stopped: its units (StopPolicy), and its summary
LINE_EVERY_S = 5.0
LOOKS_FOR_BUCKET_S = 20.0  # without a commit
SCREEN_EVERY_S = 1.0
LINES_ABOVE = 4  # of what was said before the live screen
QUIET_EVENTS = frozenset({"started", "done"})


def go_on(
    opened: OpenRun,
    region: str | None,
    detach: bool,
    as_json: bool,
    command: str,
    here: NamedHere,
    hooks: Hooks = Hooks(),
    syncer_here: bool = False,
    files: Path | None = None,
    by_region: bool = False,
) -> int:
    """Start (or adopt) what runs here, submit what has no job, and watch, or leave that to a background process.
    `here`: what this machine consents to; it is remembered for its units. `hooks`: what to call when the run stalls,
    fails or finishes. `files`: where edited texts of its jobs lie. `by_region`: a person has named the region now."""
    state = head_of(opened)
    if state.phase == "FINISHED":
        talk(f"run {opened.name} is FINISHED; start another: diloco launch RUN.yaml --set name={opened.name}-2")
        print_summary(opened, command, as_json)
        return 0
    units = units_here(opened.format, opened.url, region, lambda text: talk(f"warning: {text}"), syncer_here)
    planned = [unit for unit in units_of(opened.format, opened.url, region, syncer_here) if unit.is_submitted]
    needs_code = state.n < 0 or any(unit.kind == "learner" for unit in units)
    consented(opened.format, opened.url, here, stores_of(opened.format), code=needs_code)
    talk(f"run {opened.name} is {trust_of(opened.format)}")
    for line in starts_elsewhere(opened.format, opened.url, region):
        talk(line)
    before = jobs_before(opened, state, planned, alone=not units) if planned else None
    state = head_of(opened, state)
    stopped = state.phase == "STOPPED"
    if (stopped or syncer_may_start(opened.format, [*units, *(unit.spec for unit in planned)])) and operator_of(
        opened
    ).withdraw_stop(state):
        done = f"run {opened.name} was stopped at commit {state.n}: resuming it"
        talk(done if stopped else "an earlier stop request was never carried out: withdrawn")
    units = _beside_others(opened, state, units)
    if not units and not planned:
        hint = f"diloco status {opened.word} --watch"
        raise RefusedError(
            "nothing of the run starts here: all of it works on other machines", where=opened.name, hint=hint
        )
    words = (*([f"--region={region}"] if region else []), *(["--syncer=here"] if syncer_here else []))
    note_resuming(opened.url, Resuming(words, hooks.environment()))
    jobs = [] if before is None else submit_missing(opened, planned, here.folder, before, files, by_region)
    for line in job_lines(jobs):
        talk(line)
    if not units:
        return _submitted(opened, jobs, detach, as_json, command, hooks)
    if detach:
        return _detached(opened, as_json, command)
    return supervise_run(opened, units, region, command, as_json, hooks, jobs)


def submit_beside(opened: OpenRun, region: str | None, here: NamedHere, syncer_here: bool, by_region: bool) -> bool:
    """Submit what has no job, beside the supervisor of what runs here; False if the run has no jobs."""
    planned = [unit for unit in units_of(opened.format, opened.url, region, syncer_here) if unit.is_submitted]
    if planned:
        consented(opened.format, opened.url, here, stores_of(opened.format), code=False)
        before = jobs_before(opened, head_of(opened), planned)
        for line in job_lines(submit_missing(opened, planned, here.folder, before, by_region=by_region)):
            talk(line)
    return bool(planned)


def refuse_unless_free(url: str) -> None:
    """Wait for a supervisor of the run that is ending because the run was stopped, not for one that resumes it. Raises
    RefusedError while one lives on this machine."""
    ends = False
    if living_supervisor(url) is not None:
        opened = open_known_run(known_at(url))
        ends = opened.perform(is_at_rest(opened.format, head_of(opened)))
    if ends:
        talk(f"run {run_name(url)} was just stopped: waiting at most {ENDS_WITHIN_S:.0f} s for what ends here")
    refuse_supervised(url, ENDS_WITHIN_S if ends else 0.0)


def _beside_others(opened: OpenRun, state: RunState, units: list[UnitSpec]) -> list[UnitSpec]:
    """The units to start here. A syncer that is heard elsewhere goes on serving, and the one here stands by; learners
    that work elsewhere stay there."""
    if state.n < 0:
        return units
    try:
        facts = boxed(opened, Deadline(LOOK_S)).facts()
    except DilocoError:
        return units
    if (host := _serves_elsewhere(opened.url, facts)) and any(unit.kind == "syncer" for unit in units):
        talk(f"a syncer on {host} serves the run: the one here stands by, and takes over once that one is silent")
        units = [standing_by(unit) if unit.kind == "syncer" else unit for unit in units]
    there = _work_elsewhere(opened, facts, [unit.name for unit in units if unit.kind == "learner"])
    if there:
        works, it = ("works", "it") if len(there) == 1 else ("work", "them")
        talk(
            f"{listed(there)} {works} on another machine, or under another DILOCO_HOME: left there. To have {it} here, "
            f"end {it} there first: Ctrl-C in the `launch` or `resume` that watches {it}, or SIGTERM to its process"
        )
    return [unit for unit in units if unit.name not in there]


def _work_elsewhere(opened: OpenRun, facts: RunFacts, learners: list[str]) -> list[str]:
    """Those of these learners that were heard a moment ago, and again now, and not as this machine's unit: of one that
    has just died no second heartbeat comes."""

    def is_ours(name: str) -> bool:
        host = facts.learners[name].heartbeat.process.partition(" on ")[2]
        return host == os.uname().nodename and isinstance(read_unit(opened.url, name), UnitRecord)

    def lives(name: str) -> bool:
        try:
            opened.perform(refuse_beside_living(opened.format, name))
        except DilocoError:  # it lives, or nobody can say
            return True
        return False

    heard = [name for name in working(facts, learners) if not is_ours(name)]
    with ThreadPoolExecutor(MAX_ASKED) as pool:
        return [name for name, alive in zip(heard, pool.map(lives, heard), strict=True) if alive]


def _serves_elsewhere(url: str, facts: RunFacts) -> str:
    """The host of a syncer that is heard and is no unit of this machine; "" if there is none."""
    if facts.syncer is None or facts.syncer.age_s > syncer_lost_after_s(facts):
        return ""
    said = facts.syncer.heartbeat
    if said.state in ENDED:
        return ""
    is_ours = said.host == os.uname().nodename and read_unit(url, said.unit) is not None
    return "" if is_ours else said.host


def _submitted(
    opened: OpenRun, jobs: list[Job], detach: bool, as_json: bool, command: str, hooks: Hooks
) -> int:  # fmt: skip
    """Nothing of the run is here: watch until it is over, unless that is not wanted. Ctrl-C ends the watching alone."""
    word = opened.word
    go_on = f"the jobs go on without this command. Watch: diloco status {word} --watch; stop: diloco stop {word}"
    if not detach:
        calling = HookCaller(hooks, opened.name, opened.url, talk)
        try:
            with calling, ProgressDisplay(opened, calling, jobs):
                _await_end(FollowedLog(opened))
            print_summary(opened, command, as_json)
            return 0
        except KeyboardInterrupt:
            talk(go_on)
            return INTERRUPTED_STATUS
    if hooks.environment():
        talk("warning: nobody is left here to call --on-event or --webhook: without --detach, this command does")
    if as_json:
        print_json(command, {"run": opened.name, "url": opened.url, "state": "STARTING", "supervisor_pid": None})
    else:
        print(f"run {opened.name}: {go_on}")
    return 0


def _await_end(log: FollowedLog) -> None:
    while True:
        with suppress(StoreUnavailableError):  # the display tells
            if log.phase() in ENDINGS:
                return
        sleep_s(LINE_EVERY_S / 2)


def _detached(opened: OpenRun, as_json: bool, command: str) -> int:
    identity = start_successor(opened.url)
    if as_json:
        print_json(
            command, {"run": opened.name, "url": opened.url, "state": "STARTING", "supervisor_pid": identity.pid}
        )
    else:
        print(f"run {opened.name} goes on in the background (supervisor pid {identity.pid})")
        ends = f"diloco stop {opened.word}; or, to end only what runs here: kill {identity.pid}"
        talk(f"hint: diloco status {opened.word} --watch; {ends}")
    return 0


def supervise_run(
    opened: OpenRun,
    units: list[UnitSpec],
    region: str | None,
    command: str,
    as_json: bool,
    hooks: Hooks,
    jobs: list[Job],
) -> int:
    """Watch until the run ends here, or this machine leaves; print its summary; return the exit status."""
    log, whole = FollowedLog(opened), None
    if command == "launch" and region is None:
        names = {unit.name for unit in units}
        whole = WholeRun(lambda: log.islands() - names, partial(operator_of(opened).request_stop, "interrupted"))
    calling = HookCaller(hooks, opened.name, opened.url, talk)
    with calling, ProgressDisplay(opened, calling, jobs) as progress, telling(opened, units, progress.tell) as tell:
        outcome = supervise(
            opened.url,
            units,
            run_state=log.phase,
            on_event=tell,
            whole_run=whole,
            stop=stop_policy(opened.format, units),
            gone_after_s=gone_after_s(),
        )
        if outcome.reason == "finished":
            calling.call("finished", f"run {opened.name} is FINISHED")
    with suppress(OSError):  # the terminal has gone
        _report(opened, outcome, units, region, command, as_json)
    return outcome.exit_status


class FollowedLog:
    """The log as it was read last. A stop from before this supervision does not count: the run is being resumed, unless
    that resume was withdrawn before a syncer carried it out, which only the home bucket tells."""

    def __init__(self, opened: OpenRun) -> None:
        self._opened = opened
        self._known = head_of(opened)
        self._began_at, self._still_since_s = self._known.n, monotonic_s()

    def phase(self) -> str:
        """The run's phase, read anew."""
        before, self._known = self._known, head_of(self._opened, self._known)
        now_s = monotonic_s()
        if self._known.n != before.n:
            self._still_since_s = now_s
        elif now_s - self._still_since_s >= LOOKS_FOR_BUCKET_S:
            self._still_since_s = now_s
            self._opened.store.list(FORMAT_KEY, limit=1)  # raises if the bucket is gone: on GCS a read finds nothing
        run, url = self._opened.format, self._opened.url
        if run.home_of(url) == url and self._opened.perform(is_at_rest(run, self._known)):
            return RunPhase.STOPPED
        return phase_for(self._known, self._began_at)

    def islands(self) -> set[str]:
        """The names of all islands of the run, those that joined it too."""
        return {island.name for island in self._known.with_members(self._opened.format).all_islands}


def stop_policy(run: RunFormat, units: list[UnitSpec]) -> StopPolicy:
    """A syncer may need a while for its regions once the run is over."""
    usual = StopPolicy()
    if not run.regions or all(unit.kind != "syncer" for unit in units):
        return usual

    return replace(usual, finish_s=max(usual.finish_s, ends_within_s(run)))


def _report(
    opened: OpenRun, outcome: SupervisionResult, units: list[UnitSpec], region: str | None, command: str, as_json: bool
) -> None:
    if outcome.reason in ("interrupted", "stopped"):
        talk(f"stopped; everything committed is in the bucket. Go on with: diloco resume {opened.word}")
    elsewhere = ""
    try:
        elsewhere = _serves_elsewhere(opened.url, print_summary(boxed(opened, Deadline(LOOK_S)), command, as_json))
    finally:  # the last lines on the screen, also where the bucket does not answer
        if outcome.reason == "left":
            only = "" if region is None else f" --region {region}"
            back = f"diloco resume {opened.url}{only}"
            talk(f"left the run without stopping it; ended here: {listed(outcome.left)}. Come back: {back}")
            if elsewhere:
                talk(f"a syncer on {elsewhere} serves the run")
            elif syncer_may_start(opened.format, [unit for unit in units if unit.name in outcome.left]):
                serve = f"diloco syncer --standby {opened.format.home_of(opened.url)}"
                talk(
                    "no syncer is left here: learners elsewhere train on up to the drift bound, unless a standby takes "
                    f"over. Start one on any machine: {serve}"
                )


def print_summary(opened: OpenRun, command: str, as_json: bool) -> RunFacts:
    """The facts that it tells."""
    facts = opened.facts()
    summary = summary_of(facts, opened.local())
    if as_json:
        print_json(command, asdict(summary))
    else:
        print(summary_text(summary, screen_width()))
    return facts


class ProgressDisplay:
    """Talks on stderr while the supervision works: a live screen on a terminal, plain lines otherwise. It tells what
    becomes of the run's `jobs`, too, and hastens them."""

    def __init__(self, opened: OpenRun, calling: HookCaller, jobs: list[Job]) -> None:
        self._calling, self._url = calling, opened.url
        box, self._news = Deadline(LOOK_S), JobNews(jobs, self.say)
        self._watcher = Watcher(boxed(opened, box), box, self._hear)
        self._curves = Curves()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="progress", daemon=True)
        self._live: Any = None

    def __enter__(self) -> ProgressDisplay:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True)
            self._live.start()
            self._live.console.show_cursor()  # a supervisor that is killed cannot bring it back
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(2.0)
        if self._live is not None:
            with suppress(OSError):  # the terminal has gone
                self._live.stop()

    def tell(self, event: SupervisionEvent) -> None:
        """One line about a unit."""
        if self._live is None or event.kind not in QUIET_EVENTS:
            self.say(line_of(event))

    def _hear(self, jobs: list[Job], trouble: str) -> None:
        self._news(jobs, trouble)
        hasten(self._url, jobs)

    def say(self, line: str) -> None:
        if self._live is None:
            talk(f"{utc_now_text()} {line}" if is_started_by_diloco() else line)
        else:
            self._live.console.print(line, markup=False)

    def _loop(self) -> None:
        with suppress(OSError):  # the terminal has gone: there is nobody to talk to
            self._show()

    def _show(self) -> None:
        if self._live is not None:
            self._live.update("starting the units: a few seconds", refresh=True)
        last, seen_s, told = None, monotonic_s(), ""
        while not self._ended.wait(SCREEN_EVERY_S if self._live else LINE_EVERY_S):
            try:
                status = self._watcher.look()
            except DilocoError as error:
                if self._live is not None and last is not None:
                    self._draw(last, f"this is {format_duration(monotonic_s() - seen_s)} old: {error}")
                elif str(error) != told:
                    self.say(f"status: {error}")
                told = str(error)
                continue
            last, seen_s, told = status, monotonic_s(), ""
            self._calling.look(status.state, status.reason)
            if self._live is not None:
                self._curves.add(self._watcher.metrics)
                self._draw(status)
            else:
                talk(plain_line(status))

    def _draw(self, status: Status, trouble: str = "") -> None:
        room = self._live.console.height - LINES_ABOVE
        self._live.update(LiveScreen(status, self._curves, trouble, room), refresh=True)
