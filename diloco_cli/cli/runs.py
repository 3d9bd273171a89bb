"""`diloco runs`: the runs that this machine knows, or that lie in a bucket; `diloco runs rm`: remove a run for good."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.arguments import LOOK_S, JsonOption, OpenRun, YesOption, find_run, foreground_store, open_known_run
from diloco_cli.cli.output import console, print_json, progress, talk
from diloco_cli.errors import DilocoError, RefusedError, UsageError

if TYPE_CHECKING:
    from diloco_cli.runtime.registry import KnownRun
    from diloco_cli.store.port import Store

REMOVE = "rm"
COLUMNS = ("name", "state", "commit", "tokens", "loss", "url")


def runs(
    words: list[str] = typer.Argument(
        None, metavar="[URL | rm RUN]", help="A bucket whose runs are listed; or `rm` and the run to remove."
    ),
    yes: bool = YesOption,
    as_json: bool = JsonOption,
) -> None:
    """List the runs of this machine, those of this folder first, or the runs that lie in a bucket. `runs rm RUN`
    deletes a run, in its bucket and on this machine; nothing of it may run any more."""
    match words or []:
        case []:
            _list(_known(), as_json, "no runs here yet; hint: diloco launch RUN.yaml")
        case ["rm", run]:
            _remove(find_run(run), yes, as_json)
        case [url] if url != REMOVE:
            _list(_lying_at(url), as_json, f"no run lies at {url}")
        case _:
            raise UsageError("runs takes nothing, a bucket's URL, or rm and one run", hint="diloco runs --help")


def _known() -> list[KnownRun]:
    from diloco_cli.runtime.registry import known_runs

    return known_runs()


def _lying_at(url: str) -> list[KnownRun]:
    """The runs below this URL, by name; or the one at it."""
    from diloco_cli.protocol.log.keys import FORMAT_KEY
    from diloco_cli.runtime.registry import known_at
    from diloco_cli.store.url import join_url, normalise_store_url
    from diloco_cli.store.wrappers import Deadline

    url = normalise_store_url(url, Path())
    store = foreground_store(url, Deadline(LOOK_S))
    if store.stat(FORMAT_KEY) is not None:
        return [known_at(url)]
    return [known_at(join_url(url, name)) for name in _folders(store) if store.stat(f"{name}/{FORMAT_KEY}") is not None]


def _folders(store: Store) -> Iterator[str]:
    """The first parts of the store's keys, by one call for each."""
    after = ""
    while keys := store.list("", after, 1):
        name, slash, _ = keys[0].partition("/")
        if slash:
            yield name
        after = f"{name}0" if slash else keys[0]  # "0" follows "/": beyond all keys of that folder


def _list(found: list[KnownRun], as_json: bool, nothing: str) -> None:
    from diloco_cli.cli.status import read_status
    from diloco_cli.store.wrappers import Deadline

    rows: list[dict[str, Any]] = []
    warnings: list[str] = []
    for known in found:
        row: dict[str, Any] = {"name": known.name, "url": known.url, "this_folder": known.is_of_this_folder}
        try:
            current, _ = read_status(open_known_run(known, Deadline(LOOK_S)))
            row |= {"state": current.state, "commit": current.commit, "tokens": current.tokens, "loss": current.loss}
            row["age_s"] = current.age_s
        except DilocoError as error:
            warnings.append(f"{known.name}: {error}")
            row["state"] = "UNREACHABLE"
        rows.append(row)
    if as_json:
        print_json("runs", {"runs": rows}, warnings=warnings)
        return
    if not rows:
        talk(nothing)
        return
    _print_table(rows)
    for warning in warnings:
        talk(f"warning: {warning}")


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name.upper(), overflow="fold")
    for row in rows:
        commit, loss = row.get("commit", -1), row.get("loss")
        cells = [row["name"], row["state"], "" if commit == -1 else str(commit), f"{row.get('tokens', 0):,}"]
        table.add_row(*cells, f"{loss:.3f}" if isinstance(loss, float) else "", row["url"])
    console().print(table)


def _remove(known: KnownRun, yes: bool, as_json: bool) -> None:
    """Raises RefusedError if a unit of the run was heard lately, or lives on this machine."""
    from diloco_cli.cli.operators import confirm
    from diloco_cli.protocol.log.keys import FORMAT_KEY
    from diloco_cli.runtime.registry import forget_run
    from diloco_cli.store.open import answers
    from diloco_cli.store.port import StoreGoneError

    _refuse_living_here(known)
    stores: list[Store] = []
    with suppress(StoreGoneError):  # then there is nothing to delete but this machine's notes
        opened = open_known_run(known)
        _refuse_heard(opened)
        stores = [opened.store, *map(foreground_store, opened.format.region_urls)]
    with progress("looking what there is"):
        keys = [[key for key in _keys(store) if key != FORMAT_KEY] for store in stores]
    total = sum(map(len, keys)) + len(stores)
    confirm(f"delete run {known.name}, {total:,} objects at {known.url}?", yes)
    with progress("deleting"):
        for store, own in zip(stores, keys, strict=True):
            for _ in answers(store.delete, own):
                pass
            store.delete(FORMAT_KEY)  # last: until then the removal can be done again
            _remove_empty_folders(store.url)
    forget_run(known.url)
    if as_json:
        print_json("runs", {"removed": known.name, "url": known.url, "objects": total})
    else:
        print(f"run {known.name} is removed: {total:,} objects at {known.url}")


def _refuse_living_here(known: KnownRun) -> None:
    from diloco_cli.runtime.processes import is_alive
    from diloco_cli.runtime.registry import SUPERVISOR, list_units, living_supervisor

    living = [unit.name for unit in list_units(known.url) if is_alive(unit.identity)]
    living += [SUPERVISOR] if living_supervisor(known.url) is not None else []
    if living:
        hint = f"diloco stop {known.url}"
        raise RefusedError(f"run {known.name} lives on this machine: {', '.join(living)}", where=known.url, hint=hint)


def _refuse_heard(opened: OpenRun) -> None:
    from diloco_cli.observe.unit_states import working

    facts = opened.facts()
    names = {*facts.learners, *([] if facts.syncer is None else [facts.syncer.heartbeat.unit])}
    if heard := working(facts, names):
        raise RefusedError(
            f"run {opened.name} lives: {', '.join(heard)} worked a moment ago",
            where=opened.url,
            hint=f"diloco stop {opened.url}",
        )


def _keys(store: Store) -> Iterator[str]:
    after = ""
    while page := store.list("", after):
        yield from page
        after = page[-1]


def _remove_empty_folders(url: str) -> None:
    from diloco_cli.store.url import parse_url

    place = parse_url(url)
    for folder, _, _ in os.walk(place.place, topdown=False) if place.scheme == "file" else ():
        with suppress(OSError):  # something else lies in it
            os.rmdir(folder)
