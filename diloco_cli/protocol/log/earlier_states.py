"""The log as it was: the state after an earlier commit, for whoever goes back to it or collects what lies behind it."""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli.errors import NotFoundError
from diloco_cli.protocol.log.commit_log import next_commit, snapshot_at, snapshots_between
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState

LOOK_BACK = 4096  # commits: further back than any two snapshots of one epoch lie apart
Pulse = Callable[[], Steps[None]]
"""What a syncer does now and then so that nobody takes it for dead."""
TRIES = 3  # of the newest snapshots; after that the walk from commit 0 is the way


def no_pulse() -> Steps[None]:
    yield from ()


def state_after(run: RunFormat, n: int, pulse: Pulse = no_pulse) -> Steps[RunState]:
    """The state after commit n, from the newest snapshot that is not newer and holds, else from commit 0; `pulse` runs
    before each commit that is read. Raises NotFoundError if there is no such commit."""
    state = yield from _start(run, n)
    while state.n < n:
        yield from pulse()
        later = yield from next_commit(run, state)
        if later is None:
            raise NotFoundError(f"the log ends at commit {state.n}, before commit {n}", where=commit_key(n))
        state = later
    return state


def _start(run: RunFormat, n: int) -> Steps[RunState]:
    recent = yield from snapshots_between(max(0, n - LOOK_BACK), n)
    numbers = recent or (yield from snapshots_between(0, n))
    for number in numbers[::-1][:TRIES]:
        state = yield from snapshot_at(run, number)
        if state is not None:
            return state
    return RunState()
