"""The RUN argument of every command: a name, a run file, a bucket URL, or nothing (the newest of this directory)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from diloco_cli.processes.runs import KnownRun
    from diloco_cli.protocol.driver import SystemClock
    from diloco_cli.protocol.records import RunFormat
    from diloco_cli.store.port import Store

FOREGROUND_DEADLINE_S = 10.0
RUN_HELP = "A run's name, its run file, or its bucket URL. Default: the newest run of this directory."
RunArgument = typer.Argument(None, metavar="RUN", help=RUN_HELP)


@dataclass(frozen=True)
class OpenRun:
    """A run that exists: where it lives, its store (retrying, within a deadline), its format."""

    name: str
    url: str
    store: Store
    format: RunFormat
    clock: SystemClock


def find_run(text: str | None) -> KnownRun:
    """Where the run meant by `text` lives; a bucket URL needs no knowledge of this directory."""
    from diloco_cli.cli.output import talk
    from diloco_cli.processes.runs import KnownRun, resolve_run
    from diloco_cli.store.open import split_url

    if text is not None and "://" in text:
        return KnownRun(split_url(text)[1], text.rstrip("/"), 0.0)
    return resolve_run(text, talk, _name_in_file)


def open_run(text: str | None) -> OpenRun:
    """Raises NotFoundError (exit 4) if there is no such run, StoreError (exit 6) if its bucket cannot be read."""
    return open_known_run(find_run(text))


def open_known_run(known: KnownRun) -> OpenRun:
    from diloco_cli.clock import monotonic_s, sleep_s
    from diloco_cli.protocol.driver import SystemClock, perform
    from diloco_cli.protocol.log import read_format
    from diloco_cli.store.open import open_store
    from diloco_cli.store.retry import RetryingStore

    store = RetryingStore(open_store(known.url), deadline_s=FOREGROUND_DEADLINE_S)
    clock = SystemClock(monotonic_s, sleep_s, lambda: None)
    run = perform(read_format(known.url), store, clock)
    return OpenRun(run.name, known.url, store, run, clock)


def _name_in_file(path: Path) -> str:
    from diloco_cli.config.run_file import load_run

    return load_run(path).name
