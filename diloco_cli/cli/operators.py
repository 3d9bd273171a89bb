"""Commands of operators: `stop`, `resume`, `rollback`, `gc`, `quarantine`, `readmit`."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.arguments import (
    RUN_FILE,
    AllowCode,
    AllowStore,
    DetachOption,
    DryRunOption,
    EndJsonOption,
    JsonOption,
    OnEvent,
    OpenRun,
    RunArgument,
    SyncerOption,
    TimeoutOption,
    Webhook,
    YesOption,
    complete_units,
    find_run,
    head_of,
    is_here,
    is_run_file,
    named_here,
    open_run,
    operator_of,
)
from diloco_cli.cli.output import print_json, progress, talk
from diloco_cli.errors import DilocoError, RefusedError, StoreError, TryAgainError, UsageError
from diloco_cli.quantities import format_duration, format_size
from diloco_cli.runtime.processes import is_started_by_diloco
from diloco_cli.store.open import discard_leftovers_at
from diloco_cli.store.port import StoreGoneError

if TYPE_CHECKING:
    from diloco_cli.protocol.log.records import RequestKind
    from diloco_cli.protocol.log.state import RunState


ALL_REGIONS = "all"
ResumedRegionOption = typer.Option(
    None,
    "--region",
    help=f"Start only this region's islands; {ALL_REGIONS}: of all regions. Default: as on this machine before.",
)


def open_unfinished(run: str | None, kind: RequestKind) -> tuple[OpenRun, RunState]:
    """The run and the head of its log. A run that is FINISHED, or has no version yet, is not operated on."""
    from diloco_cli.syncer.operator import refuse_finished

    opened = open_run(run, acts=True)
    state = head_of(opened)
    refuse_finished(opened.name, state, kind)
    if state.n < 0:
        raise TryAgainError(f"run {opened.name} has no commit yet", hint=f"diloco status {opened.word}")
    return opened, state


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere only --yes will do. Raises RefusedError (exit 8) for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise RefusedError("this cannot be taken back, and nobody is there to ask", hint="say so beforehand: --yes")
    if not typer.confirm(question, default=False, err=True):
        raise RefusedError("nothing was changed")


def stop(
    run: str | None = RunArgument,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """Stop a run cleanly, on all machines; `diloco resume` goes on with it. Without its bucket: end what runs here."""
    from diloco_cli.cli.jobs import end_jobs
    from diloco_cli.protocol.log.state import RunPhase

    try:
        opened = open_run(run, acts=True)
    except StoreGoneError as error:
        _stop_without_bucket(run, error, as_json)
        return
    state, cancelled = head_of(opened), list[str]()
    if state.phase == "RUNNING":
        state, cancelled = _stopped(opened, state, timeout_s)
    else:
        talk(f"run {opened.name} is {state.phase} already")
        if state.phase == "STOPPED" and operator_of(opened).keep_stopped(state):
            talk("a resume that nobody had carried out yet is withdrawn")
    if cancelled := cancelled or end_jobs(opened):
        talk(f"jobs that were cancelled: {', '.join(cancelled)}")
    phase = RunPhase.STOPPED if state.n < 0 else state.phase
    if as_json:
        print_json("stop", {"run": opened.name, "state": phase, "commit": state.n})
    elif phase == "STOPPED":
        at = f"at commit {state.n}; go on with" if state.n >= 0 else "before its first commit; begin it with"
        print(f"run {opened.name} STOPPED {at}: diloco resume {opened.word}")


def _stopped(opened: OpenRun, state: RunState, timeout_s: float | None) -> tuple[RunState, list[str]]:
    """The head after the stop. Where nobody could carry it out, as of a run that is still in an engine's queue, its
    jobs end first, which are returned; then it is asked for again, but of a run that has not begun."""
    from diloco_cli.cli.jobs import end_jobs

    operator = operator_of(opened, timeout_s)
    try:
        return operator.stop(state, "diloco stop"), []
    except TryAgainError:
        cancelled = end_jobs(opened)
        if not cancelled:
            raise
    state = head_of(opened, state)
    if state.n >= 0 and state.phase == "RUNNING":
        state = operator.stop(state, "diloco stop")
    return state, cancelled


def _stop_without_bucket(run: str | None, error: StoreGoneError, as_json: bool) -> None:
    """End what runs here. Raises the error if nothing does."""
    from diloco_cli.runtime.registry import noted_at
    from diloco_cli.runtime.supervisor import end_here

    known = find_run(run, acts=True)
    name, ended = known.name, end_here(noted_at(known.url))
    if not ended:
        raise error
    talk(f"the bucket of run {name} is gone: {error}")
    if as_json:
        print_json("stop", {"run": name, "state": "GONE", "ended": ended})
    else:
        print(f"run {name}: ended here: {', '.join(ended)}; if the bucket comes back: diloco resume {known.url}")


def resume(
    run: str | None = RunArgument,
    region: str | None = ResumedRegionOption,
    syncer: str | None = SyncerOption,
    detach: bool = DetachOption,
    as_json: bool = EndJsonOption,
    on_event: str | None = OnEvent,
    webhook: str | None = Webhook,
    allow_code: list[str] = AllowCode,
    allow_store: list[str] = AllowStore,
) -> None:
    """Go on with a run from its bucket alone; living units are adopted, missing jobs submitted. Ctrl-C ends what runs
    here; the run goes on."""
    from diloco_cli.cli.hooks import hooks_of
    from diloco_cli.cli.jobs import just_typed, name_partitions
    from diloco_cli.cli.supervision import go_on, refuse_unless_free, submit_beside
    from diloco_cli.runtime.registry import remember_run

    hooks, syncer_here = hooks_of(on_event, webhook), is_here(syncer)
    opened = open_run(run, at_home=False, acts=True)
    _say_unused(opened, Path(run) if run is not None and is_run_file(run) else RUN_FILE)
    here = named_here(allow_code, allow_store, Path(run) if run is not None and is_run_file(run) else None)
    of_all = region == ALL_REGIONS and all(island.region != region for island in opened.format.islands)
    typed = just_typed(None if of_all else region)
    region, syncer_here = (None, syncer_here) if of_all else _as_before(opened, region, syncer_here)
    name_partitions(opened.url, opened.format, typed)
    by_region = typed is not None
    try:
        refuse_unless_free(opened.url)
    except RefusedError:
        if not submit_beside(opened, region, here, syncer_here, by_region):
            raise
        talk(f"what runs here is supervised already: diloco status {opened.word} --watch")
        return
    remember_run(opened.url, (opened.format.home_of(opened.url), *opened.format.region_urls))
    sys.exit(go_on(opened, region, detach, as_json, "resume", here, hooks, syncer_here, by_region=by_region))


def _as_before(opened: OpenRun, region: str | None, syncer_here: bool) -> tuple[str | None, bool]:
    """The region (None: all), and whether the syncer runs here: as typed; without a region, as this machine was asked
    last, so that of two machines each resumes what it had."""
    from diloco_cli.runtime.registry import read_resuming

    words = () if region is not None or is_started_by_diloco() else read_resuming(opened.url).words
    if not words:
        return region, syncer_here
    talk(f"{' '.join(words)}, as before on this machine; all regions: --region {ALL_REGIONS}")
    regions = [word.partition("=")[2] for word in words if word.startswith("--region=")]
    return (regions[0] if regions else None), syncer_here or "--syncer=here" in words


def _say_unused(opened: OpenRun, file: Path) -> None:
    """What the run's file says now and the run does not use, as its settings never change; of another file nothing."""
    from diloco_cli.config.run_file import load_run_with_origins
    from diloco_cli.launch.plan_files import settings_changes
    from diloco_cli.report.numbers import read_launch_plan

    changed = []
    with suppress(DilocoError):
        if file.is_file() and find_run(str(file)).url == opened.url:
            changed = settings_changes(opened.format.settings, *load_run_with_origins(file))
    planned = read_launch_plan(opened.store) if changed else None
    by_hand = [key for key, place in (planned.origins if planned else {}).items() if place.startswith("--set")]
    unused = [one for one in changed if not any(re.match(rf"{re.escape(key)}[ ._]", one) for key in by_hand)]
    if unused:
        verb = "is" if len(unused) == 1 else "are"
        talk(
            f"{file} was changed since this run began: {', '.join(unused)} {verb} not used; the run goes on with its"
            f" own settings. To begin anew: diloco launch {shlex.quote(str(file))} --set name={opened.name}-2"
        )


def rollback(
    run: str | None = RunArgument,
    to: int = typer.Option(..., "--to", metavar="COMMIT", help="The commit to go back to."),
    dry_run: bool = DryRunOption,
    yes: bool = YesOption,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """Go back to how the parameters were after an earlier commit."""
    opened, state = open_unfinished(run, "rollback")
    data = _rollback_facts(opened, _rollback_plan(opened, state, to), state)
    if not as_json:
        _show_rollback(opened.name, data)
    if not dry_run:
        confirm(f"roll run {opened.name} back to commit {to}?", yes)
        with progress("asking the syncer"):
            state = operator_of(opened, timeout_s).request("rollback", to=to)
        data |= {"commit": state.n, "version": state.base_floor}
    if as_json:
        print_json("rollback", data | {"dry_run": dry_run})
    elif not dry_run:
        print(f"run {opened.name}: back to commit {to}, as version {state.base_floor} of every fragment")
        talk(f"hint: to undo it: diloco rollback {opened.word} --to {state.base_floor - 1}")


def _rollback_plan(opened: OpenRun, state: RunState, to: int) -> RunState:
    """The state after commit `to`."""
    from diloco_cli.protocol.actors.requests import missing_objects, return_to

    then = opened.perform(return_to(opened.format, state, to))
    if isinstance(then, str):
        raise UsageError(then, where=opened.name, hint=f"its commits: diloco events {opened.word}")
    missing = opened.perform(missing_objects(then.outputs))
    if missing:
        raise UsageError(f"not there any more: {missing[0]} (and {len(missing) - 1} more)", where=opened.name)
    return then


def _rollback_facts(opened: OpenRun, then: RunState, now: RunState) -> dict[str, Any]:
    layout = opened.format.layout
    changed = sum(o.state_digest != c.state_digest for o, c in zip(then.outputs, now.outputs, strict=True))
    return {
        "run": opened.name,
        "to": then.n,
        "time": then.metrics.updated_at,
        "commit": now.n,
        "merges_left": now.merges - then.merges,
        "tokens_left": now.tokens(layout) - then.tokens(layout),
        "tokens": then.tokens(layout),
        "tokens_before": now.tokens(layout),
        "loss": then.metrics.loss,
        "loss_before": now.metrics.loss,
        "fragments_changed": changed,
        "fragments": len(then.outputs),
    }


def _show_rollback(name: str, data: dict[str, Any]) -> None:
    def loss(value: float | None) -> str:
        return "not evaluated" if value is None else f"{value:.4f}"

    print(f"run {name}: from commit {data['commit']} back to commit {data['to']} of {data['time']}")
    merges = f"{data['merges_left']} merges of commits {data['to'] + 1} to {data['commit']}"
    print(f"  no longer counts  {merges}, {data['tokens_left']:,} tokens")
    print(f"  tokens            {data['tokens_before']:,} -> {data['tokens']:,}; the learning rate goes back with them")
    print(f"  loss              {loss(data['loss_before'])} -> {loss(data['loss'])}")
    print(f"  fragments         {data['fragments_changed']} of {data['fragments']} change")
    print("  learners          replace their parameters and go on; their data is not read again")


SAMPLE = 8  # objects of each kind whose size is requested


def gc(
    run: str | None = RunArgument,
    dry_run: bool = DryRunOption,
    yes: bool = YesOption,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """Delete what only older commits need; the newest stay to verify and to go back to."""
    opened, state = open_unfinished(run, "gc")
    floor, found = _survey(opened, state)
    data = _gc_facts(opened, state, floor, found)
    if not as_json:
        _show_gc(data)
    if not dry_run:
        confirm(f"delete these objects of run {opened.name}?", yes)
        grace = format_duration(opened.format.settings.retention.grace_s)
        talk(f"deletions begin {grace} after the floor is in the log, for readers that are on their way")
        with progress("asking the syncer"):
            state = operator_of(opened, timeout_s).request("gc", to=floor)
        _discard_leftovers(opened.url)
        data |= {"floor": state.gc_floor, "commit": state.n}
    if as_json:
        print_json("gc", data | {"dry_run": dry_run})
    elif not dry_run:
        print(f"run {opened.name}: floor at commit {state.gc_floor}")
        talk("hint: a syncer that serves the run deletes beside its work; diloco verify works all the while")


def _discard_leftovers(url: str) -> None:
    try:
        found = discard_leftovers_at(url)
    except StoreError as error:
        talk(f"unfinished objects of killed writers are left to the syncer: {error}")
        return
    if found.num_files:
        talk(f"{found.num_files} unfinished objects of killed writers went: {format_size(found.num_bytes)}")


def _survey(opened: OpenRun, state: RunState) -> tuple[int, dict[str, list[str]]]:
    from diloco_cli.protocol.actors.collection import floor_by_request, survey

    floor = floor_by_request(opened.format, state)
    if isinstance(floor, str):
        raise UsageError(floor, where=opened.name)
    return floor, opened.perform(survey(opened.format, state, floor))


def _gc_facts(opened: OpenRun, state: RunState, floor: int, found: dict[str, list[str]]) -> dict[str, Any]:
    objects = {kind: len(keys) for kind, keys in found.items()}
    return {
        "run": opened.name,
        "commit": state.n,
        "floor_before": state.gc_floor,
        "floor": floor,
        "objects": objects,
        "bytes_about": sum(_bytes_about(opened, keys) for keys in found.values()),
    }


def _bytes_about(opened: OpenRun, keys: list[str]) -> int:
    """From the sizes of a few, evenly spread: asking for each would be a request each."""
    chosen = keys[:: max(1, len(keys) // SAMPLE)][:SAMPLE]
    sizes = [stat.size_bytes for stat in map(opened.store.stat, chosen) if stat is not None]
    return round(len(keys) * sum(sizes) / len(sizes)) if sizes else 0


def _show_gc(data: dict[str, Any]) -> None:
    counts = ", ".join(f"{number} {kind}" for kind, number in data["objects"].items() if number)
    print(f"run {data['run']}: floor from commit {data['floor_before']} to {data['floor']}, of {data['commit']}")
    print(f"  goes    {counts or 'nothing'}: about {format_size(data['bytes_about'])}")
    print("  stays   commits, epochs; all that is needed to replay, and to go back to, later commits")


LearnerArgument = typer.Argument(
    ..., metavar="LEARNER", help="Its name, as `diloco status` shows it.", autocompletion=complete_units
)


def quarantine(
    learner: str = LearnerArgument,
    run: str | None = RunArgument,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """Keep a learner out: its offers are refused until `diloco readmit`. What it has merged stays: diloco rollback."""
    from diloco_cli.protocol.rules.merging import why_not_quarantined

    opened, state = open_unfinished(run, "quarantine")
    refused = why_not_quarantined(learner, state, opened.format)
    if refused:
        raise UsageError(refused, where=opened.name)
    _request(opened, "quarantine", learner, "is kept out", timeout_s, as_json)


def readmit(
    learner: str = LearnerArgument,
    run: str | None = RunArgument,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """End a learner's quarantine: its offers are merged again."""
    opened, state = open_unfinished(run, "readmit")
    kept_out = sorted(name for name, known in state.learners.items() if known.quarantined is not None)
    if learner not in kept_out:
        names = ", ".join(kept_out) or "none"
        raise UsageError(f"{learner!a} is not quarantined in run {opened.name}; quarantined: {names}")
    _request(opened, "readmit", learner, "is readmitted", timeout_s, as_json)


def _request(
    opened: OpenRun, kind: RequestKind, learner: str, done: str, timeout_s: float | None, as_json: bool
) -> None:
    state = operator_of(opened, timeout_s).request(kind, f"diloco {kind}", learner=learner)
    if as_json:
        print_json(kind, {"run": opened.name, "learner": learner, "commit": state.n})
    else:
        print(f"run {opened.name}: {learner} {done}, as of commit {state.n}")
