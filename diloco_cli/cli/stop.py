"""`diloco stop`: ends a run cleanly, wherever its processes are; `diloco resume` goes on with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.cli.operators import JsonOption, TimeoutOption, answer_here, answered
from diloco_cli.cli.output import print_json, talk
from diloco_cli.cli.run_argument import OpenRun, RunArgument, head_of, open_run
from diloco_cli.clock import utc_now_text
from diloco_cli.errors import TryAgainError
from diloco_cli.randomness import nonce

if TYPE_CHECKING:
    from diloco_cli.protocol.log.state import RunState


def stop(
    run: str | None = RunArgument,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """Stop a run cleanly; `diloco resume` goes on with it."""
    opened = open_run(run)
    state = head_of(opened)
    if state.phase == "RUNNING":
        state = _stop(opened, state, timeout_s)
    else:
        talk(f"run {opened.name} is {state.phase} already")
    if as_json:
        print_json("stop", {"run": opened.name, "state": state.phase, "commit": state.n})
    elif state.phase == "STOPPED":
        print(f"run {opened.name} STOPPED at commit {state.n}; go on with: diloco resume {opened.name}")


def _stop(opened: OpenRun, state: RunState, timeout_s: float | None) -> RunState:
    """Ask the syncer to commit a stop; with no syncer alive, commit it here."""
    state = answered(opened, state, request_stop(opened, "diloco stop", state), timeout_s)
    if state.phase != "RUNNING":
        return state
    talk("no syncer answers: committing the stop from here")
    state = answer_here(opened)
    if state.phase == "RUNNING":
        raise TryAgainError("the run has not begun, or its syncer is busy", hint=f"diloco status {opened.name}")
    return state


def request_stop(opened: OpenRun, reason: str, state: RunState) -> int:
    """Write the request and return its number; the syncer carries it out."""
    from diloco_cli.protocol.actors.requests import ask_to_stop

    return opened.perform(ask_to_stop(state, nonce(), utc_now_text(), reason, opened.format.keyring))
