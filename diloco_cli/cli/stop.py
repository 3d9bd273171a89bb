"""`diloco stop`: ends a run cleanly, wherever its processes are; `diloco resume` goes on with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.cli.operators import JsonOption, TimeoutOption, operator_of
from diloco_cli.cli.output import print_json, talk
from diloco_cli.cli.run_argument import RunArgument, find_run, head_of, open_run

if TYPE_CHECKING:
    from diloco_cli.store.port import StoreGoneError


def stop(
    run: str | None = RunArgument,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """Stop a run cleanly, on all machines; `diloco resume` goes on with it. Without its bucket: end what runs here."""
    from diloco_cli.store.port import StoreGoneError

    try:
        opened = open_run(run)
    except StoreGoneError as error:
        _stop_without_bucket(run, error, as_json)
        return
    state = head_of(opened)
    if state.phase == "RUNNING":
        state = operator_of(opened, timeout_s).stop(state, "diloco stop")
    else:
        talk(f"run {opened.name} is {state.phase} already")
        if state.phase == "STOPPED" and operator_of(opened).keep_stopped(state):
            talk("a resume that nobody had carried out yet is withdrawn")
    if as_json:
        print_json("stop", {"run": opened.name, "state": state.phase, "commit": state.n})
    elif state.phase == "STOPPED":
        print(f"run {opened.name} STOPPED at commit {state.n}; go on with: diloco resume {opened.name}")


def _stop_without_bucket(run: str | None, error: StoreGoneError, as_json: bool) -> None:
    """End what runs here. Raises the error if nothing does."""
    from diloco_cli.runtime.supervisor import end_here

    name = find_run(run).name
    ended = end_here(name)
    if not ended:
        raise error
    talk(f"the bucket of run {name} is gone: {error}")
    if as_json:
        print_json("stop", {"run": name, "state": "GONE", "ended": ended})
    else:
        print(f"run {name}: ended here: {', '.join(ended)}; if the bucket comes back: diloco resume {name}")
