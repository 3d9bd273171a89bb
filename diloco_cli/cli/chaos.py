"""`diloco chaos`: break a unit of a run on this machine, or in its job, on purpose and on the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.chaos.faults import Fault, Target
from diloco_cli.cli.arguments import (
    DryRunOption,
    JsonOption,
    OpenRun,
    RunArgument,
    RunOption,
    complete_units,
    find_run,
    head_of,
    open_known_run,
)
from diloco_cli.cli.output import print_json, progress, table, talk
from diloco_cli.cli.simulate import of_existing
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.config.codec import to_plain
from diloco_cli.engines.port import Job
from diloco_cli.errors import HypothesisError, NotFoundError, RefusedError, StoreError, TryAgainError, UsageError
from diloco_cli.events.bucket import tell_event
from diloco_cli.faults import VERIFY, Injection, Scenario, find_scenario, timetable
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunPhase
from diloco_cli.quantities import format_duration, parse_duration
from diloco_cli.runtime.registry import SUPERVISOR, KnownRun, noted_at, read_unit, run_name

if TYPE_CHECKING:
    from diloco_cli.chaos.actions import JournalEntry
    from diloco_cli.chaos.storm import Storm
    from diloco_cli.observe.status import Status
    from diloco_cli.report.history import RunHistory
    from diloco_cli.report.storm import StormReport
    from diloco_cli.runtime.units import RunUnit

ANSWERS_WITHIN_S = 60.0  # Python and torch may have to be loaded on the node first
MERGES_WITHIN_S, LOOK_EVERY_S = 120.0, 2.0  # after a storm, until every unit has merged again
UNIT = typer.Argument(..., help="A learner's name, syncer or supervisor.", autocompletion=complete_units)

chaos = typer.Typer(
    help="Break a unit of a run, here or in its job: only own units, on the record, and healed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@chaos.command("run")
def storm(
    scenario: str = typer.Argument(..., metavar="SCENARIO", help="A scenario file, or a built-in one's name."),
    run: str | None = RunArgument,
    seed: int = typer.Option(None, "--seed", min=0, help="Default: the scenario's."),
    json_output: bool = JsonOption,
    dry_run: bool = typer.Option(False, "-n", "--dry-run", help="Only print the timetable."),
) -> None:
    """Carry out a scenario on the units that live here, then say PASS or FAIL (exit 7). Its seed gives its timetable,
    the same as that of `diloco simulate run`. Ctrl-C heals and ends it."""
    from diloco_cli.chaos.storm import REAL, Storm, refuse_untouchable
    from diloco_cli.forecast.fleet import units_of
    from diloco_cli.forecast.run import goodput_under
    from diloco_cli.observe.status import status_of
    from diloco_cli.report.storm import storm_text

    story = find_scenario(scenario, REAL)
    opened = open_known_run(_known(run, dry_run))
    whole, number = head_of(opened).with_members(opened.format), story.seed if seed is None else seed
    faults = timetable(story, units_of(whole), number)
    if dry_run:
        if json_output:
            planned = [to_plain(fault) for fault in faults]
            data = {"run": opened.name, "scenario": story.name, "seed": number, "faults": planned, "dry_run": True}
            print_json("chaos run", data)
        else:
            print("\n".join(fault.describe() for fault in faults) or "no faults")
        return
    url, status = noted_at(opened.url), status_of(opened.facts(), opened.local())
    _refuse_beyond(opened, status, scenario, faults)
    refuse_untouchable(url)
    subject = of_existing(opened)
    history = _history_before(opened, subject.run, story, faults)
    with progress("simulating it"):
        predicted = goodput_under(subject.run, faults, number, story.duration_s, subject.machine, subject.starts)
    happened = Storm(url, story, number, faults, talk)
    happened.run()
    report = _reported(opened, happened, history, VERIFY in story.hypotheses, predicted)
    failed = [checked for checked in report.hypotheses if not checked.ok]
    told = "; ".join(f"{checked.text}: {checked.value}" for checked in failed)
    error = HypothesisError(told, hint=f"diloco report {opened.word}") if failed else None
    if json_output:
        print_json("chaos run", {**to_plain(report), "verdict": report.verdict, "dry_run": False}, error=error)
        if error is not None:
            raise typer.Exit(error.exit_status)
        return
    print(storm_text(report))
    if error is not None:
        raise error
    talk(f"faults as marks over loss and tokens/s: diloco report {opened.word}")


@chaos.command("kill")
def kill(
    unit: str = UNIT,
    run: str | None = RunOption,
    hold: bool = typer.Option(False, "--hold", help="Keep it down until `diloco chaos revive`."),
    json_output: bool = JsonOption,
    dry_run: bool = DryRunOption,
) -> None:
    """Kill a unit with SIGKILL; its supervisor restarts it unless --hold is given."""
    from diloco_cli.chaos.actions import execute, plan_kill

    known = _known(run, dry_run)
    if _in_its_job(known, unit, "kill", dry_run, json_output, ["--hold"] if hold else []):
        return
    fault = plan_kill(noted_at(known.url), unit, hold=hold)
    _carry_out(fault, lambda: _told(known.url, fault, execute(fault)), dry_run, json_output)


@chaos.command("pause")
def pause(
    unit: str = UNIT,
    run: str | None = RunOption,
    duration: str | None = typer.Option(None, "--for", help="Such as 10 s or 2 min; waits, and ends the pause."),
    json_output: bool = JsonOption,
    dry_run: bool = DryRunOption,
) -> None:
    """Pause a unit with SIGSTOP until --for is over (Ctrl-C: earlier), or until `diloco chaos revive`."""
    from diloco_cli.chaos.actions import execute_pause, plan_pause

    for_s = None if duration is None else parse_duration(duration)
    known = _known(run, dry_run)
    if _in_its_job(known, unit, "pause", dry_run, json_output, [f"--for={duration}"] if duration else [], for_s or 0.0):
        return
    fault = plan_pause(noted_at(known.url), unit, for_s=for_s)

    def pause_and_tell() -> JournalEntry:
        if for_s is None:
            return _told(known.url, fault, execute_pause(fault))
        entry = execute_pause(fault, on_paused=lambda entry: _tell(known.url, fault, entry))
        tell_event(known.url, "revived", fault.target.name, "goes on: its pause is over")
        return entry

    _carry_out(fault, pause_and_tell, dry_run, json_output)


@chaos.command("revive")
def revive(
    unit: str = UNIT, run: str | None = RunOption, json_output: bool = JsonOption, dry_run: bool = DryRunOption
) -> None:
    """Take back a pause or a hold: the unit goes on, or its supervisor starts it again."""
    from diloco_cli.chaos.actions import plan_revive
    from diloco_cli.chaos.actions import revive as do_revive

    known = _known(run, dry_run)
    if _in_its_job(known, unit, "revive", dry_run, json_output):
        return
    name, target = known.name, plan_revive(noted_at(known.url), unit)
    if dry_run:
        also = f"{', held' if target.held else ''}{target.disturbed and f', {target.disturbed}'}"
        talk(f"would revive {target.name} ({target.condition}{also})")
        if json_output:
            print_json("chaos revive", {"run": name, "target": target.name, "dry_run": True})
        return
    revival = do_revive(target)
    if revival.entry.verified:
        tell_event(known.url, "revived", target.name, "no longer paused or held down, by `diloco chaos revive`")
    if target.held and not target.supervised:
        talk(f"no supervisor lives here; go on with `diloco resume {known.url}`")
    if not revival.entry.verified:
        raise TryAgainError(f"{target.name} was told to go on, but it is paused still", hint="diloco chaos list")
    if json_output:
        facts = {
            "continued": revival.continued,
            "cleared": revival.cleared,
            "released": revival.released,
            "restarts": revival.restarts,
        }
        print_json("chaos revive", {"run": name, "target": target.name, "dry_run": False, **facts})
        return
    done = ["goes on"] if revival.continued else []
    done += [f"its calls are no longer {target.disturbed}"] if revival.cleared else []
    done += ["no longer held"] if revival.released else []
    done += ["its supervisor starts it again"] if revival.restarts else []
    print(f"{target.name}: {', '.join(done) or 'nothing to do'}")


@chaos.command("preempt")
def preempt(
    unit: str = UNIT, run: str | None = RunOption, json_output: bool = JsonOption, dry_run: bool = DryRunOption
) -> None:
    """Take a job away from a unit, as its engine does for others: it drains, and comes back."""
    from diloco_cli.cli.jobs import engine_for

    known = _known(run, dry_run)
    found = _job_of(known, unit)
    if found is None:
        raise RefusedError(f"{unit} is no job of run {known.name}: no engine takes it away", hint="diloco chaos kill")
    its, job = found
    deed = f"{job.engine} takes job {job.id} away, and queues it again"
    if not dry_run:
        engine_for(known.url, its.infra).preempt(job)
        tell_event(known.url, "chaos", unit, f"on purpose: {deed}", {"fault": "preempt"})
    if json_output:
        print_json("chaos preempt", {"run": known.name, "target": unit, "job": job.id, "dry_run": dry_run})
    else:
        print(f"{unit}: {'would: ' if dry_run else ''}{deed}")


def _known(run: str | None, only_looks: bool) -> KnownRun:
    """The run; what a storm that has died left behind is healed, by who acts."""
    from diloco_cli.chaos.storm import heal_after_death

    known = find_run(run, acts=True)
    if not only_looks:
        heal_after_death(noted_at(known.url))
    return known


def _refuse_beyond(opened: OpenRun, status: Status, scenario: str, faults: Sequence[Injection]) -> None:
    times = [fault.at_s for fault in faults if not fault.skipped]
    if status.state in ("FINISHED", "STOPPED", "FAILED"):
        raise RefusedError(f"run {opened.name} is {status.state}", hint=status.hint or f"diloco status {opened.word}")
    if not times:
        raise UsageError("no fault can happen", where=scenario, hint=f"diloco chaos run {scenario} --dry-run")
    if status.eta_s is not None and max(times) > status.eta_s:
        last, left = format_duration(max(times)), format_duration(status.eta_s)
        hint = f"faults within {left}, or in virtual time: diloco simulate run {opened.word} --scenario {scenario}"
        raise UsageError(f"its last fault comes at {last}, and the run is over in {left}", where=scenario, hint=hint)


def _history_before(opened: OpenRun, run: RunFormat, story: Scenario, faults: Sequence[Injection]) -> RunHistory:
    """Warns where there will be nothing to compare the storm with."""
    from diloco_cli.report.history import marks_of, read_history
    from diloco_cli.report.storm import NOT_STEADY, settles_s, steady_merges

    facts = opened.facts()
    history = read_history(opened.store, opened.format, facts.state)
    first_s = min(fault.at_s for fault in faults if not fault.skipped)
    if first_s < settles_s(run) and not steady_merges(
        history, marks_of(history, facts.written), facts.now_s - history.started_s, story.duration_s
    ):
        talk(f"warning: {NOT_STEADY}; as it is, this storm will have no goodput")
    return history


def _reported(
    opened: OpenRun, happened: Storm, history: RunHistory, verifies: bool, predicted: float | None
) -> StormReport:
    """Once every struck unit has merged again, or had its time to."""
    from diloco_cli.cli.run_data import problem_of
    from diloco_cli.observe.status import status_of
    from diloco_cli.report.history import marks_of, read_history
    from diloco_cli.report.storm import awaited, storm_report

    until_s, state = monotonic_s() + MERGES_WITHIN_S, head_of(opened)
    with progress("waiting until every unit merges again"):
        history = read_history(opened.store, opened.format, state, known=history)
        while awaited(happened.strikes, history) and state.phase == RunPhase.RUNNING and monotonic_s() < until_s:
            sleep_s(LOOK_EVERY_S)
            state = head_of(opened, state)
            history = read_history(opened.store, opened.format, state, known=history)
    problem = problem_of(opened) if verifies else None
    facts, islands = opened.facts(state), len(state.with_members(opened.format).islands)
    marks, now = marks_of(history, facts.written), status_of(facts, opened.local()).state
    return storm_report(opened.name, happened, history, marks, islands, now, problem, predicted)


def _job_of(known: KnownRun, unit: str) -> tuple[RunUnit, Job] | None:
    """None if it is a unit of this machine, or of none that is known here."""
    from diloco_cli.cli.jobs import job_of

    if unit == SUPERVISOR or read_unit(noted_at(known.url), unit) is not None:
        return None
    try:
        opened = open_known_run(known)
    except (NotFoundError, StoreError):
        return None
    return job_of(opened, unit)


def _in_its_job(
    known: KnownRun, unit: str, deed: str, dry_run: bool, as_json: bool, words: Sequence[str] = (), for_s: float = 0.0
) -> bool:
    """Whether it is a job: then the same command has run inside it, where its notes and its journal are."""
    from diloco_cli.cli.jobs import run_beside

    found = _job_of(known, unit)
    if found is None:
        return False
    its, job = found
    talk(f"{'would ' if dry_run else ''}{deed} {unit} in its job {job.id}{f' on {job.node}' if job.node else ''}")
    given = (*words, *(["--dry-run"] if dry_run else []), *(["--json"] if as_json else []))

    def act(deed: str, *given: str) -> str:
        return run_beside(its, job, ("chaos", deed, unit, f"--run={its.url}", *given), ANSWERS_WITHIN_S + for_s)

    try:
        print(act(deed, *given), end="")
    except KeyboardInterrupt:  # what would have healed it in the job has ended too
        if for_s:
            act("revive")
        raise
    return True


@chaos.command("list")
def list_(run: str | None = RunOption, json_output: bool = JsonOption) -> None:
    """List the units of a run on this machine: how they are, and what was last done to them."""
    from diloco_cli.chaos.actions import overview

    known = _known(run, only_looks=True)
    rows = [_row(target, fault) for target, fault in overview(noted_at(known.url))]
    if json_output:
        print_json("chaos list", {"run": known.name, "units": rows})
        return
    print("\n".join(table([COLUMNS, *map(_cells, rows)], left=range(len(COLUMNS)))))


def _told(url: str, fault: Fault, entry: JournalEntry) -> JournalEntry:
    """The same entry; the bucket has been told."""
    _tell(url, fault, entry)
    return entry


def _tell(url: str, fault: Fault, entry: JournalEntry) -> None:
    from diloco_cli.chaos.actions import read_entries

    number = 1 + [known.id for known in read_entries(fault.target.url)].index(entry.id)
    deed = fault.describe().partition(";")[0]  # what comes of it is told by events of its own
    text = f"on purpose (chaos #{number}): {deed}"
    tell_event(url, "chaos", fault.target.name, text, {"number": number, "fault": entry.fault})


COLUMNS = ("NAME", "STATE", "PID", "HELD", "LAST FAULT")


def _row(target: Target, fault: JournalEntry | None) -> dict[str, Any]:
    return {
        "name": target.name,
        "kind": target.kind,
        "state": target.condition,
        "pid": target.pid if target.condition in {"running", "paused"} else None,
        "held": target.held,
        "disturbed": target.disturbed or None,
        "why": target.why,
        "last_fault": asdict(fault) if fault else None,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    fault = row["last_fault"]
    held, last = "held" if row["held"] else "-", f"{fault['fault']} {fault['time']}" if fault else "-"
    state = f"{row['state']}, {row['disturbed']}" if row["disturbed"] else row["state"]
    return (row["name"], state, str(row["pid"] or "-"), held, last)


def _carry_out(fault: Fault, execute: Callable[[], JournalEntry], dry_run: bool, json_output: bool) -> None:
    talk(f"{'would ' if dry_run else ''}{fault.describe()}")
    entry = None if dry_run else execute()
    if entry is not None and not entry.verified:
        raise TryAgainError(f"{fault.kind} of {fault.target.name} was sent, but it did not happen in time")
    if json_output:
        faults = [] if entry is None else [asdict(entry)]
        data = {"run": run_name(fault.target.url), "plan": fault.describe(), "dry_run": dry_run, "faults": faults}
        print_json(f"chaos {fault.kind}", data)
    elif entry is not None:
        healed = ", healed" if entry.healed else ""
        print(f"{fault.kind} {fault.target.name}: injected, verified{healed}")
