"""`diloco stop`: ends a run cleanly, wherever its processes are; `diloco resume` goes on with it."""

from __future__ import annotations

from diloco_cli.cli.operators import JsonOption, TimeoutOption, operator_of
from diloco_cli.cli.output import print_json, talk
from diloco_cli.cli.run_argument import RunArgument, head_of, open_run


def stop(
    run: str | None = RunArgument,
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """Stop a run cleanly, on all machines; `diloco resume` goes on with it."""
    opened = open_run(run)
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
