"""`diloco runs`: the runs that this machine knows, or that lie in a bucket; `diloco runs rm`: remove a run for good."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from diloco_cli.cli.arguments import LOOK_S, JsonOption, OpenRun, YesOption, find_run, foreground_store, open_known_run
from diloco_cli.cli.jobs import JobWatch
from diloco_cli.cli.operators import confirm
from diloco_cli.cli.output import print_json, progress, table, talk
from diloco_cli.cli.status import read_status
from diloco_cli.config.codec import to_plain
from diloco_cli.errors import DilocoError, NotFoundError, RefusedError, UsageError, escaped
from diloco_cli.observe.unit_states import working
from diloco_cli.protocol.log.keys import FORMAT_KEY, is_of_a_run
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES
from diloco_cli.runtime.consent import refused_stores
from diloco_cli.runtime.processes import is_alive
from diloco_cli.runtime.registry import (
    SUPERVISOR,
    KnownRun,
    forget_run,
    known_at,
    known_runs,
    list_units,
    living_supervisor,
)
from diloco_cli.store.open import answers
from diloco_cli.store.port import Store, StoreGoneError, all_keys
from diloco_cli.store.url import join_url, normalise_store_url, parse_url
from diloco_cli.store.wrappers import Deadline

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
    """Those that were launched or resumed here, and the one of this folder, which may have come here as files."""
    known = known_runs()
    with suppress(DilocoError):  # there is none here, or its bucket does not answer
        ours = find_run(None, say=lambda text: None)
        if all(one.url != ours.url for one in known):
            store = foreground_store(ours.url, Deadline(LOOK_S))
            return [ours, *known] if store.stat(FORMAT_KEY) is not None else known
    return known


def _lying_at(url: str) -> list[KnownRun]:
    """The runs below this URL, by name; or the one at it."""
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
    rows: list[dict[str, Any]] = []
    warnings: list[str] = []
    silent = ""  # why an engine has not answered: it is not waited for again
    for known in found:
        row: dict[str, Any] = {"name": known.name, "url": known.url, "this_folder": known.is_of_this_folder}
        try:
            opened = open_known_run(known, Deadline(LOOK_S))
            watch = JobWatch(opened)
            status, _ = read_status(opened, None, None if silent else watch.look)
            silent = silent or watch.trouble
            row |= {"jobs": to_plain(status.jobs)} if status.jobs else {}
            row |= {"state": status.state, "commit": status.commit, "tokens": status.tokens, "loss": status.loss}
            row["age_s"] = status.age_s
        except DilocoError as error:
            warnings.append(f"{known.name}: {error}")
            row["state"] = "UNREACHABLE"
        rows.append(row)
    warnings += [silent] if silent else []
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
    has_jobs = any("jobs" in row for row in rows)
    lines = [[name.upper() for name in (*COLUMNS[:-1], *(["jobs"] if has_jobs else []), *COLUMNS[-1:])]]
    for row in rows:
        commit, loss = row.get("commit", -1), row.get("loss")
        cells = [row["name"], row["state"], "" if commit == -1 else str(commit), f"{row.get('tokens', 0):,}"]
        counts = Counter(job["state"] for job in row.get("jobs", []))
        jobs = [", ".join(f"{count} {state}" for state, count in counts.items())] if has_jobs else []
        lines.append([*cells, f"{loss:.3f}" if isinstance(loss, float) else "", *jobs, row["url"]])
    print("\n".join(map(escaped, table(lines, left=range(len(lines[0]))))))


def _remove(known: KnownRun, yes: bool, as_json: bool) -> None:
    """Raises RefusedError if a unit of the run was heard lately, or lives on this machine."""
    _refuse_living_here(known.name, [known.url])
    opened: OpenRun | None = None
    places: dict[str, Store] = {}
    try:
        opened = open_known_run(known)
    except (NotFoundError, StoreGoneError):
        if not known.launched_s:
            raise
    if opened is not None:
        places = _places_of(opened)
        _refuse_living(opened, list(places))
    with progress("looking what there is"):
        keys = {url: _keys(store) for url, store in places.items()}
    total = sum(map(len, keys.values()))
    what = f"{total:,} objects at {' and '.join(places)}" if places else f"this machine's notes of {known.url}"
    confirm(f"delete run {known.name}: {what}?", yes)
    if opened is not None:
        _refuse_living(opened, list(places))  # it may have gone on while the question stood
    with progress("deleting"):
        for url in reversed(keys):  # home last: until then the removal can be done again
            _delete(places[url], keys[url])
    for url in places or [known.url]:
        forget_run(url)
    if as_json:
        print_json("runs rm", {"run": known.name, "url": known.url, "objects": total})
    else:
        print(f"run {known.name} is removed: {what}")


def _places_of(opened: OpenRun) -> dict[str, Store]:
    """The stores that hold the run: home first, then those of its regions which are really this run's and which this
    machine may use. Raises RefusedError for a region's URL, because home would be left."""
    home = opened.format.home_of(opened.url)
    if home != opened.url:
        raise RefusedError(
            "this is a region's bucket; the run lives in another", where=opened.url, hint=f"diloco runs rm {home}"
        )
    regions = [url for url in dict.fromkeys(opened.format.region_urls) if url != home]
    if refused := refused_stores(opened.format, opened.url, regions):
        hint = "remove a region's objects with that store's own tools"
        raise RefusedError(f"only the run's format names these buckets: {', '.join(refused)}", where=home, hint=hint)
    stores = {url: foreground_store(url) for url in regions}
    written = opened.store.get(FORMAT_KEY, MAX_RECORD_BYTES)
    foreign = [url for url, store in stores.items() if store.get(FORMAT_KEY, MAX_RECORD_BYTES) not in (written, None)]
    if foreign:
        raise RefusedError(f"another run lies at {', '.join(foreign)}", where=home, hint="look first: diloco runs URL")
    return {home: opened.store, **stores}


def _refuse_living(opened: OpenRun, urls: list[str]) -> None:
    _refuse_living_here(opened.name, urls)
    facts = opened.facts()
    names = {*facts.learners, *([] if facts.syncer is None else [facts.syncer.heartbeat.unit])}
    if heard := working(facts, names):
        hint = f"diloco stop {opened.url}"
        raise RefusedError(
            f"run {opened.name} lives: {', '.join(heard)} worked a moment ago", where=opened.url, hint=hint
        )


def _refuse_living_here(name: str, urls: list[str]) -> None:
    for url in urls:
        living = [unit.name for unit in list_units(url) if is_alive(unit.identity)]
        living += [SUPERVISOR] if living_supervisor(url) is not None else []
        if living:
            hint = f"diloco stop {url}"
            raise RefusedError(f"run {name} lives on this machine: {', '.join(living)}", where=url, hint=hint)


def _keys(store: Store) -> list[str]:
    """Those of the run, its format at the end. What else lies in its folder is its owner's."""
    return sorted(filter(is_of_a_run, all_keys(store)), key=lambda key: key == FORMAT_KEY)


def _delete(store: Store, keys: list[str]) -> None:
    for _ in answers(store.delete, keys[:-1]):
        pass
    for key in keys[-1:]:
        store.delete(key)
    _remove_empty_folders(store.url)


def _remove_empty_folders(url: str) -> None:
    place = parse_url(url)
    for folder, _, _ in os.walk(place.place, topdown=False) if place.scheme == "file" else ():
        with suppress(OSError):  # something else lies in it
            os.rmdir(folder)
