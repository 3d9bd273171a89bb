"""`diloco syncer --standby`: waits for its turn without a model in memory, then serves as any syncer does."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from diloco_cli.clock import sleep_s, utc_now_text
from diloco_cli.errors import NoSpaceError, StoreError
from diloco_cli.events.bucket import tell_event
from diloco_cli.protocol.actors.standby import Standby
from diloco_cli.protocol.log.commit_log import read_format
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, ProcessClaim
from diloco_cli.randomness import jitter
from diloco_cli.runtime.consent import NamedHere, consented, signing_secret, stores_of
from diloco_cli.runtime.daemon import StopSignal, opened, own_claim, perform, say
from diloco_cli.signing import LOG
from diloco_cli.store.retry import retrying_text

if TYPE_CHECKING:
    from diloco_cli.syncer.daemon import Rebuild

NICENESS = 10
LEAVE_S = 5.0  # what a syncer may still finish when its host has gone
STDIN = 0


def run_standby(
    url: str,
    name: str,
    instead_of: int | None,
    hosted: bool,
    rebuild: Rebuild,
    here: NamedHere = NamedHere(),
    alike: bool = False,
) -> int:
    """Exit status: 0 when the run is over. Raises what a syncer raises once it has taken over.

    `name`: the standby's; `instead_of`: the pid of its dead predecessor on this host; `hosted`: by a learner's
    process; it then runs at low priority, and ends when that process ends. `here`: what this machine consents to;
    `alike`: see `Standby`.
    """
    stop = StopSignal()
    stop.hear_signals()
    if hosted:
        os.nice(NICENESS)
        threading.Thread(target=_leave_with_host, args=(stop,), name="host", daemon=True).start()
    if alike:  # its job has room for a syncer: the run does not wait for torch once the other one has left
        import diloco_cli.syncer.daemon  # noqa: F401
    claim = own_claim()
    held: dict[str, bytes] = {}
    reason = _wait(url, name, instead_of, claim, stop, here, held, alike)
    if reason is None:
        say(f"{utc_now_text()} {name}: the run is over")
        return 0
    say(f"{utc_now_text()} {reason}")
    from diloco_cli.syncer.daemon import serve_run

    return serve_run(url, stop, claim, rebuild, here, name, reason, held)


def _wait(
    url: str,
    name: str,
    instead_of: int | None,
    claim: ProcessClaim,
    stop: StopSignal,
    here: NamedHere,
    held: dict[str, bytes],
    alike: bool,
) -> str | None:
    """`held`: gets the records that it has read."""
    meter, store, _, clock = opened(url, stop, f"{name}: ")
    process = psutil.Process()

    def facts() -> dict[str, Any]:
        counts = meter.counts
        return {
            "up_bytes": counts.up_bytes,
            "down_bytes": counts.down_bytes,
            "requests": counts.num_requests,
            "memory_bytes": process.memory_info().rss,
            "retrying": retrying_text(store),
        }

    def tell(text: str) -> None:
        say(f"{utc_now_text()} {name}: {text}")
        tell_event(url, "mended", name, text)

    try:
        run = perform(read_format(url, signing_secret(), (LOG,)), store, clock)
        held.update(run.kept)
        run = replace(run, kept=held)
        begins = store.get(commit_key(0), MAX_RECORD_BYTES) is None
        consented(run, url, here, stores_of(run), code=begins)  # or what it needs would be refused at the takeover
        say(f"{utc_now_text()} {name}: stands by for run {run.name}")
        waiting = Standby(run, claim, name, jitter(), instead_of, facts, tell, alike, _load)
        return perform(waiting.wait(), store, clock, tries_once=meter)
    except (StoreError, NoSpaceError):
        stop.check()  # a stop ends the retries of a failing store: that is no failure of this standby
        raise


def _load() -> Steps[None]:
    """Torch: elsewhere only when it takes over."""
    import diloco_cli.syncer.daemon  # noqa: F401

    yield from ()


def _leave_with_host(stop: StopSignal) -> None:
    """The host holds the other end of stdin, and the kernel closes it on any death."""
    while os.read(STDIN, 1):
        continue
    stop.ask()
    sleep_s(LEAVE_S)
    os._exit(143)
