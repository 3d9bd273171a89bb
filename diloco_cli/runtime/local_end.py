"""Ends what runs of a run on this machine, without its bucket: for a bucket that is gone."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.errors import RefusedError
from diloco_cli.runtime.identity import Identity, is_alive, signal_process
from diloco_cli.runtime.registry import SUPERVISOR, list_units, living_supervisor

SUPERVISOR_ENDS_S = 4.0  # it ends its units; a second signal makes it kill them
UNIT_ENDS_S = 1.0
POLL_S = 0.05


def end_here(run: str) -> list[str]:
    """Ends the supervisor first, which would start units again, then units that live on. Returns who lived."""
    supervisor = living_supervisor(run)
    found = {} if supervisor is None else {SUPERVISOR: supervisor}
    found |= {unit.name: unit.identity for unit in list_units(run) if is_alive(unit.identity)}
    if supervisor is not None:
        for _ in range(2):
            _signal(supervisor, signal.SIGTERM)
            if _wait(lambda: not is_alive(supervisor), SUPERVISOR_ENDS_S):
                break
    for signum in (signal.SIGTERM, signal.SIGKILL):
        living = [identity for identity in found.values() if is_alive(identity)]
        for identity in living:
            _signal(identity, signum)
        if _wait(lambda living=living: not any(map(is_alive, living)), UNIT_ENDS_S):  # type: ignore[misc]
            break
    return list(found)


def _signal(identity: Identity, signum: int) -> None:
    with suppress(RefusedError):  # it has ended
        signal_process(identity, signum)


def _wait(holds: Callable[[], bool], within_s: float) -> bool:
    until_s = monotonic_s() + within_s
    while not holds():
        if monotonic_s() >= until_s:
            return False
        sleep_s(POLL_S)
    return True
