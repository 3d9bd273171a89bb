"""A real run in a bucket that is far away: python -m tests.studies.far_bucket [--learners 8] [--slot 1] [--merges 200]

`diloco syncer` as it is, and light learners with the product's protocol code and store clients, each a process, on the
fake GCS, where each request takes 40 ms more. Prints the seconds from merge to merge in slots, the learners in a merge,
and what the syncer says of itself; ends with status 1 if a merge takes more than 1.1 slots in the mean, or has
fewer than 0.95 of the learners.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import mean, quantiles

import psutil

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.launch.new_run import layout_of
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.commits import Commit, Merge
from diloco_cli.protocol.log.keys import FORMAT_KEY, SYNCER, commit_key, heartbeat_key
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import decode, encode
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from tests.benchmarks.measure import machine
from tests.contract.emulators import environment, server
from tests.studies.toy_runs import FRAGMENTS, LOCAL_STEPS, float_run, spawned

CLOCK = SystemClock(monotonic_s, sleep_s, lambda: None)
DELAY_MS, ELEMENTS, WARM_UP = 40, 4096, 24
MAX_SLOTS, LEAST_INPUTS = 1.1, 0.95
LIMIT_SLOTS = 4.0  # a merge


@dataclass(frozen=True)
class FarFound:
    """`gaps_s`: from merge to merge; `inputs`: the learners' mean share; `cpu_s`: of the syncer, a merge."""

    gaps_s: Sequence[float]
    inputs: float
    cpu_s: float
    said: str

    def text(self, slot_s: float) -> str:
        shares = quantiles([gap_s / slot_s for gap_s in self.gaps_s], n=20)
        spread = f"5 % {shares[0]:.2f}, median {shares[9]:.2f}, 95 % {shares[18]:.2f}"
        pace = f"a merge each {mean(self.gaps_s) / slot_s:.3f} slots ({spread}, n={len(self.gaps_s)})"
        cpu = f"{1000 * self.cpu_s:.0f} ms of the syncer's CPU a merge"
        return f"{pace}, {self.inputs:.3f} of the learners in it, {cpu}\n{self.said}"


def far_run(learners: int, slot_s: float) -> RunFormat:
    run = float_run(1 << 20, slot_s * FRAGMENTS / LOCAL_STEPS, ELEMENTS, [f"l{number}" for number in range(learners)])
    return replace(run, layout=layout_of(run.settings))


@contextmanager
def started(run: RunFormat, url: str, logs: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The run's processes, by name, until the end."""
    words = {island.name: ["tests.studies.toy_process", "float-learner", url, island.name] for island in run.islands}
    words["syncer"] = ["diloco_cli", "syncer", f"--run={url}", "--allow-code=tests.studies.toy_task"]
    processes = {
        name: spawned(logs / f"{name}.log", *what, DILOCO_HOME=str(logs / "home")) for name, what in words.items()
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def merges_until(store: Store, run: RunFormat, count: int, within_s: float) -> RunState:
    """The log once it has so many merges."""
    state, ends_s = RunState(), time.monotonic() + within_s
    while state.merges < count:
        state = perform(read_log(run, state), store, CLOCK)
        if time.monotonic() > ends_s:
            raise RuntimeError(f"{state.merges} of {count} merges within {within_s:.0f} s")
        time.sleep(0.5)
    return state


def measured(run: RunFormat, url: str, slot_s: float, merges: int, logs: Path) -> FarFound:
    store = open_store(url)
    store.create(FORMAT_KEY, encode(run))
    with started(run, url, logs) as processes:
        syncer = psutil.Process(processes["syncer"].pid)
        merges_until(store, run, WARM_UP, 60 + LIMIT_SLOTS * WARM_UP * slot_s)
        began_s = sum(syncer.cpu_times()[:2])
        state = merges_until(store, run, WARM_UP + merges, LIMIT_SLOTS * merges * slot_s)
        cpu_s = sum(syncer.cpu_times()[:2]) - began_s
        said = (store.get(heartbeat_key(SYNCER), 1 << 20) or b"").decode()
    commits = [decode(Commit, store.get(commit_key(n), 1 << 20) or b"", commit_key(n)) for n in range(state.n + 1)]
    kept = [commit for commit in commits if isinstance(commit, Merge)][WARM_UP:]
    times_s = [datetime.fromisoformat(commit.time).timestamp() for commit in kept]
    gaps_s = [after - before for before, after in pairwise(times_s)]
    inputs = mean(len(commit.inputs) for commit in kept) / len(run.islands)
    return FarFound(gaps_s, inputs, cpu_s / merges, f"the syncer's last heartbeat: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--slot", type=float, default=1.0, help="seconds")
    parser.add_argument("--merges", type=int, default=200)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *about: sys.exit(143))  # so that nothing that was started stays behind
    run = far_run(arguments.learners, arguments.slot)
    print(f"# {machine()}; load {os.getloadavg()[0]:.1f} at the start", flush=True)
    with ExitStack() as stack:
        endpoint = stack.enter_context(server("fake_gcs", "bucket", "--delay-ms", str(DELAY_MS)))
        stack.enter_context(environment({"STORAGE_EMULATOR_HOST": endpoint}))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = measured(run, f"gs://bucket/{nonce()}", arguments.slot, arguments.merges, logs)
    fleet = f"{arguments.learners} learners, slots of {arguments.slot:g} s, {DELAY_MS} ms a call"
    print(f"{fleet}: {found.text(arguments.slot)}")
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    holds = mean(found.gaps_s) <= MAX_SLOTS * arguments.slot and found.inputs >= LEAST_INPUTS
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
