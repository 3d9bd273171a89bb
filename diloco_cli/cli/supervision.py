"""What `launch` and `resume` share: units of a run on this machine, watched until the run ends here."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from diloco_cli.cli.output import print_json, talk
from diloco_cli.cli.run_argument import LOOK_S, OpenRun, foreground_store, head_of
from diloco_cli.cli.status import read_status
from diloco_cli.cli.stop import request_stop
from diloco_cli.environment import environment_value
from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.protocol.actors.training import is_over
from diloco_cli.protocol.log.commit_log import require_keys
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.ending import Event, SupervisionResult
from diloco_cli.runtime.logs import StoreWords
from diloco_cli.runtime.signing_key import signing_secret
from diloco_cli.runtime.supervisor import supervise
from diloco_cli.runtime.units import UnitSpec, learner_unit, syncer_units
from diloco_cli.signing import KEY_FILE_VARIABLE, KEY_VARIABLE, LOG, Secret
from diloco_cli.store.time_box import TimeBox

LINE_EVERY_S = 5.0
SCREEN_EVERY_S = 1.0
QUIET_EVENTS = frozenset({"started", "done"})


def units_here(run: RunFormat, url: str, region: str | None, folder: Path | None) -> list[UnitSpec]:
    """The learners of `region` (or of all regions) whose islands are local, and the syncers in the home region."""
    regions = sorted({island.region for island in run.islands} | {syncer_region(run)})
    if region is not None and region not in regions:
        raise UsageError(f"run {run.name} has no region {region!r}; it has: {', '.join(regions)}")
    islands = [i for i in run.islands if i.infra == "local" and region in (None, i.region)]
    home = run.home_of(url)
    secret = signing_secret()
    require_keys(run, secret, (LOG,), url)
    units = []
    for island, device in zip(islands, devices_of(islands), strict=True):
        threads = threads_of(island, run.settings.train.threads)
        unit = learner_unit(island.name, run.url_for(island.region, home), threads=threads)
        own = {**device, **keys_of(run, island.name, secret)}
        units.append(replace(unit, environment={**unit.environment, **own}))
    if region in (None, syncer_region(run)):
        units += syncer_units(home, run.settings.syncer, threads=1)
    if not units:
        raise UsageError(f"no island of region {region} runs on this machine (infra: local)")
    modules = module_environment(folder)
    return [replace(unit, environment={**unit.environment, **modules}) for unit in units]


def syncer_region(run: RunFormat) -> str:
    """Where `--region` starts the syncer: the home region, or the first one if none is named."""
    return run.home_region or min(island.region for island in run.islands)


def threads_of(island: Island, at_least: int) -> int:
    """cpu:4 means four cores."""
    return max(at_least, island.num_accelerators) if island.accelerator.lower() == "cpu" else at_least


def devices_of(islands: list[Island]) -> list[dict[str, str]]:
    """Environments that give each of several CUDA islands a device of its own, in order."""
    cuda = [island.name for island in islands if not island.accelerator.lower().startswith(("cpu", "mps", "apple"))]
    if len(cuda) < 2:
        return [{} for _ in islands]
    visible = (environment_value("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(cuda))))).split(",")
    if len(visible) < len(cuda):
        talk(f"warning: {len(cuda)} islands share {len(visible)} visible devices")
    device = {name: visible[index % len(visible)] for index, name in enumerate(cuda)}
    return [{"CUDA_VISIBLE_DEVICES": device[i.name]} if i.name in device else {} for i in islands]


def keys_of(run: RunFormat, name: str, secret: Secret | None) -> dict[str, str]:
    """A learner of a signed run gets its own two keys in place of the run's secret, unless it hosts a syncer."""
    if run.signing is None or secret is None or secret.learner is not None or run.settings.syncer.on_learners:
        return {}
    return {KEY_VARIABLE: secret.for_learner(run.run_id, name), KEY_FILE_VARIABLE: ""}


def module_environment(folder: Path | None) -> dict[str, str]:
    """Lets units find the modules of entrypoints that lie beside the run file."""
    if folder is None:
        return {}
    earlier = environment_value("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder.absolute()), *([earlier] if earlier else [])])}


def say_what_runs_elsewhere(run: RunFormat, url: str, region: str | None) -> None:
    home = run.home_of(url)
    for island in run.islands:
        if island.infra != "local" and region in (None, island.region):
            its = run.url_for(island.region, home)
            talk(f"{island.name} ({island.infra}): start it there: diloco learner --run {its} --name {island.name}")
            if run.signing is not None:
                talk(f"  with its key, made here: diloco key learner {run.name} {island.name} FILE")
    if region not in (None, syncer_region(run)) and not run.settings.syncer.on_learners:
        talk(f"syncer: not here, but in region {syncer_region(run)}: start it there: diloco syncer --run {home}")


def supervise_run(opened: OpenRun, units: list[UnitSpec], whole_run: bool, command: str, as_json: bool) -> int:
    """Watch until the run ends here; print its summary; return the exit status."""
    with Progress(opened) as progress:
        outcome = supervise(
            opened.name,
            units,
            run_state=_phase_reader(opened),
            on_event=progress.tell,
            request_stop=(lambda: request_stop(opened, "interrupted", head_of(opened))) if whole_run else None,
        )
    return _report(opened, outcome, command, as_json)


def _phase_reader(opened: OpenRun) -> Callable[[], str]:
    """The run's phase in the bucket. A stop from before this supervision does not count: the run is being resumed."""
    known = head_of(opened)
    began_at = known.n

    def phase() -> str:
        nonlocal known
        known = head_of(opened, known)
        return known.phase if is_over(known, began_at) else "RUNNING"

    return phase


def _report(opened: OpenRun, outcome: SupervisionResult, command: str, as_json: bool) -> int:
    if outcome.reason in ("interrupted", "stopped"):
        talk(f"stopped; everything committed is in the bucket. Go on with: diloco resume {opened.name}")
    print_summary(boxed(opened, TimeBox(LOOK_S)), command, as_json)
    return outcome.exit_status


def print_summary(opened: OpenRun, command: str, as_json: bool) -> None:
    from diloco_cli.observe.summary import summary_of, summary_text

    summary = summary_of(opened.facts())
    if as_json:
        print_json(command, asdict(summary))
    else:
        print(summary_text(summary))


def boxed(opened: OpenRun, box: TimeBox) -> OpenRun:
    """The same run, seen through a store whose calls end with the box."""
    return replace(opened, store=foreground_store(opened.url, box, quiet=True))


class Progress:
    """Talks on stderr while the supervision works: a live screen on a terminal, plain lines otherwise."""

    def __init__(self, opened: OpenRun) -> None:
        self._box = TimeBox(LOOK_S)
        self._opened = boxed(opened, self._box)
        self._known: RunState | None = None
        self._words = StoreWords(opened.name)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="progress", daemon=True)
        self._live: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True)
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(2.0)
        if self._live is not None:
            self._live.stop()

    def tell(self, event: Event) -> None:
        """One line about a unit."""
        if self._live is None or event.kind not in QUIET_EVENTS:
            self._print(f"{event.unit or 'run'}: {event.kind}: {event.text}")

    def _print(self, line: str) -> None:
        if self._live is None:
            talk(line)
        else:
            self._live.console.print(line, markup=False)

    def _loop(self) -> None:
        from diloco_cli.observe.render import plain_line, status_view

        while not self._ended.wait(SCREEN_EVERY_S if self._live else LINE_EVERY_S):
            for word in self._words.news():
                self._print(f"{word.unit}: store: {word.text}")
            self._box.restart(LOOK_S)
            try:
                status, self._known = read_status(self._opened, self._known)
            except DilocoError as error:
                self._print(f"status: {error}")
                continue
            if self._live is not None:
                self._live.update(status_view(status), refresh=True)
            else:
                talk(plain_line(status))
