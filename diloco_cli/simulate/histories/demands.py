"""What is demanded of a history at its end, and while no faults strike: restarts, reasons, work and no spinning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.protocol.driver import perform
from diloco_cli.protocol.keys import SYNCER
from diloco_cli.protocol.log import read_log
from diloco_cli.simulate.histories.bucket import Bucket
from diloco_cli.simulate.histories.monitor import check_folded
from diloco_cli.simulate.histories.options import POLL_BOUNDS_S
from diloco_cli.simulate.histories.processes import LARGEST_DRIFT
from diloco_cli.simulate.histories.replayer import LIVENESS, Replayer, ViolationError, expect
from diloco_cli.store.retry import LONGEST_PAUSE_S

if TYPE_CHECKING:
    from diloco_cli.simulate.histories.history import History

SETTLED_S = 2 * LONGEST_PAUSE_S + 5.0  # without faults: by then every client has tried again
POLLS_A_SECOND = 1.5 * (1 + LARGEST_DRIFT) / POLL_BOUNDS_S[0]


def check_reasons(history: History) -> None:
    """Where nothing was committed for two rounds, whoever serves says why."""
    rounds_s = 2 * history.options.slot_s * history.options.slowest * history.options.fragments
    silent = history.world.now_s - history.monitor.last_commit_s > rounds_s + 1.0
    for process in history.supervisor.processes:
        serves = process.serves
        mute = serves is not None and serves.doing == "SERVING" and not serves.reason
        if silent and mute and not process.ended and history.world.now_s - process.started_s > SETTLED_S:
            raise ViolationError(LIVENESS, f"{process.name} waits and gives no reason")


def check_work(history: History) -> None:
    """Nobody spins, and whoever was stopped works again."""
    now_s, commits = history.world.now_s, history.monitor.replayer.n - history.healed_n
    processes = history.supervisor.processes
    learners = sum(process.role in history.roles for process in processes) * (1 if history.region is None else 2)
    for process in processes:
        spent_s = min(now_s, process.ended_s) - max(history.healed_s, process.started_s)
        asks = learners + 2 if process.role == SYNCER else 1
        each = 30 + 6 * learners
        bound = POLLS_A_SECOND * max(0.0, spent_s) * asks + each * (commits + 4) + 4 * history.monitor.deletions
        done = process.operations - history.healed_operations.get(process.name, 0)
        expect(done <= bound, LIVENESS, f"{process.name} asked the store {done} times in {spent_s:.1f} s: it spins")
        merges = min(history.monitor.replayer.merges, process.ended_merges) - process.started_merges
        rounds = merges / history.options.fragments
        idle = process.role in history.roles and process.name not in history.monitor.worked
        long = spent_s > SETTLED_S and rounds > 4
        expect(not (idle and long), LIVENESS, f"{process.name} is there for {rounds:.0f} rounds and idle")


def check_restart(history: History, replayer: Replayer) -> None:
    """10: twice from the newest snapshot, and once from the beginning."""
    for objects in (history.bucket.objects, history.bucket.objects, _without_hints(history.bucket.objects)):
        copy = Bucket()
        copy.objects = objects
        check_folded(perform(read_log(history.run), copy, _Still()), replayer, history.run)


class _Still:
    """A clock for reading only."""

    def now_s(self) -> float:
        return 0.0

    def sleep_s(self, seconds: float) -> None:
        raise AssertionError("reading the log never sleeps")

    def check(self) -> None:
        return


def _without_hints(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {key: data for key, data in objects.items() if not key.startswith("hint/")}
