"""`diloco status --watch`: one look at the run after the other, until it ends: a live screen on a terminal, else a line
or a JSON object each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from diloco_cli.cli.output import console, print_json, talk
from diloco_cli.cli.run_argument import LOOK_S, OpenRun, boxed, open_run
from diloco_cli.clock import sleep_s
from diloco_cli.config.codec import to_plain
from diloco_cli.errors import NotFoundError, StoreError

if TYPE_CHECKING:
    from diloco_cli.observe.status import Status
    from diloco_cli.protocol.log.metrics import Metrics
    from diloco_cli.protocol.log.state import RunState
    from diloco_cli.store.wrappers import Deadline

BATCHES_A_LOOK = 256  # of events: enough for what is recent
Tell = Callable[[str], None]


def awaited_run(run: str | None, box: Deadline, every_s: float) -> OpenRun:
    """The run, once it exists. The person may watch before it is launched."""
    from diloco_cli.runtime.registry import known_runs
    from diloco_cli.store.port import StoreGoneError
    from diloco_cli.store.retry import is_retryable

    waits = False
    while True:
        box.restart(LOOK_S)
        try:
            return open_run(run, box)
        except (NotFoundError, StoreError) as error:
            absent = isinstance(error, NotFoundError | StoreGoneError)
            if not absent and not (waits and isinstance(error, StoreError) and is_retryable(error)):
                raise
            if run is None and known_runs():  # the newest one, whose bucket has gone
                raise
            if not waits:
                talk(f"{error}: waiting for it (Ctrl-C ends)")
            waits = True
        sleep_s(every_s)


def read_status(opened: OpenRun, known: RunState | None = None) -> tuple[Status, RunState]:
    """`known` is the state returned by the call before: then only what is new is read."""
    from diloco_cli.observe.status import status_of

    facts = opened.facts(known, BATCHES_A_LOOK)
    return status_of(facts, opened.local()), facts.state


@contextmanager
def riding_out(what: str, tell: Tell = talk) -> Iterator[None]:
    """For one look of many: where the store does not answer now, that is told, and the next look may find more. Raises
    what no later look can mend, such as a bucket that is gone."""
    from diloco_cli.store.retry import is_retryable

    try:
        yield
    except StoreError as error:
        if not is_retryable(error):
            raise
        tell(f"{what}: {error}")


class Watcher:
    """One look after the other, each with a time limit of its own; each reads only what is new. `metrics`: those of the
    last look that the store answered."""

    metrics: Metrics

    def __init__(self, opened: OpenRun, box: Deadline) -> None:
        self._opened, self._box = opened, box
        self._known: RunState | None = None

    def look(self) -> Status:
        self._box.restart(LOOK_S)
        current, self._known = read_status(self._opened, self._known)
        self.metrics = self._known.metrics
        return current


def watch(opened: OpenRun, box: Deadline, every_s: float, as_json: bool) -> Status:
    """The last status: of a run that has ended. If the store does not answer, the first look ends with an error; a
    later one keeps the last status and tells why, because the person who watches wants to see when it answers again."""
    if sys.stdout.isatty() and not as_json:
        return _watch_live(Watcher(boxed(opened, box), box), every_s)
    return _watch_lines(Watcher(opened, box), every_s, as_json)


def _watch_lines(watcher: Watcher, every_s: float, as_json: bool) -> Status:
    from diloco_cli.observe.screen import plain_line
    from diloco_cli.observe.situation import OVER

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

    from diloco_cli.observe.live import Curves, LiveScreen
    from diloco_cli.observe.situation import OVER

    trouble: list[str] = []
    current, curves = watcher.look(), Curves()
    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            curves.add(watcher.metrics)
            live.update(LiveScreen(current, curves, " ".join(trouble)), refresh=True)
            if current.state in OVER:
                return current
            sleep_s(every_s)
            trouble.clear()
            with riding_out("status", trouble.append):
                current = watcher.look()
