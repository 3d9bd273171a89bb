"""`diloco gc`: deletes now what nothing needs any more; a run does so by itself behind `retention.rounds`.

The floor is raised until two rounds are left; the syncer deletes what lies behind it, little by little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco_cli.cli.operators import (
    DryRunOption,
    JsonOption,
    TimeoutOption,
    YesOption,
    confirm,
    open_unfinished,
    operator_of,
)
from diloco_cli.cli.output import print_json, progress, talk
from diloco_cli.cli.run_argument import OpenRun, RunArgument
from diloco_cli.errors import UsageError
from diloco_cli.units import format_duration, format_size

if TYPE_CHECKING:
    from diloco_cli.protocol.log.state import RunState

LEFTOVERS_WITHIN_S = 60.0
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
    data = _data(opened, state, floor, found)
    if not as_json:
        _show(data)
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
    from diloco_cli.store.open import discard_leftovers_at
    from diloco_cli.store.port import StoreUnavailableError
    from diloco_cli.store.wrappers import Deadline, call_within

    try:
        found = call_within(Deadline(LEFTOVERS_WITHIN_S), lambda: discard_leftovers_at(url), url)
    except StoreUnavailableError as error:
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


def _data(opened: OpenRun, state: RunState, floor: int, found: dict[str, list[str]]) -> dict[str, Any]:
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


def _show(data: dict[str, Any]) -> None:
    counts = ", ".join(f"{number} {kind}" for kind, number in data["objects"].items() if number)
    print(f"run {data['run']}: floor from commit {data['floor_before']} to {data['floor']}, of {data['commit']}")
    print(f"  goes    {counts or 'nothing'}: about {format_size(data['bytes_about'])}")
    print("  stays   commits, epochs; all that is needed to replay, and to go back to, later commits")
