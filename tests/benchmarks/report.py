"""How long a report on a long run takes: `python -m tests.benchmarks.report [--commits N] [--keep DIRECTORY]`.

100,000 commits of merges of 8 of 64 learners, with evaluations, restarts, takeovers and outages, built with the
product's own records, without a syncer and without fsync; then the commands as people start them, on file://. Goals: a
report within 10 s and 500 MB, a series with at most 2,000 points, a page below 3 MB; `status` within 1 s. Seconds
of wall time, process start included. Then, without it, what `status` and `report` read, where each call of the store
takes 40 ms more, as in a cloud: `status` within 2 s; of the report 5,000 commits are read, and its seconds are those of
as many as the log has, by rule of three.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from diloco_cli.cli.status import BATCHES_A_LOOK
from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.environment import environment_with
from diloco_cli.observe.facts import read_facts
from diloco_cli.observe.status import status_of
from diloco_cli.protocol.log.commits import Commit, EpochStart, Evaluation
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, SyncerHeartbeat
from diloco_cli.protocol.log.keys import FORMAT_KEY, SYNCER, commit_key, heartbeat_key
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, RunFormat, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.report.history import MAX_POINTS
from diloco_cli.runtime.daemon import CommitsAhead, SystemClock
from diloco_cli.store.local import LocalStore
from diloco_cli.store.port import Store
from diloco_cli.store.wrappers import EmulatedLink
from tests.benchmarks import resume
from tests.benchmarks.measure import machine, row

LEARNERS, PARTICIPANTS, SLOT_S = 64, 8, 2.5
START_S = 1_790_000_000.0
EVALUATE_EVERY, RESTART_EVERY, TAKEOVER_EVERY = 50, 700, 9000
MB = 1e6
CLOCK = SystemClock(monotonic_s, sleep_s, lambda: None)
ROUNDS = 3
CLOUD_RTT_S, IN_A_CLOUD = 0.04, 5_000


def draft(run: RunFormat, state: RunState) -> Commit:
    """8 learners that take turns, so that all 64 are known; each incarnation of one is a little longer than a day."""
    n, epoch = state.n + 1, 1 + (state.n + 1) // TAKEOVER_EVERY
    time = datetime.fromtimestamp(START_S + SLOT_S * n + 120 * (n // TAKEOVER_EVERY), UTC).isoformat()
    said = resume.header(state, time, epoch)
    if n == 0:
        return resume.first(run, said)
    if n % TAKEOVER_EVERY == 0:
        return EpochStart(**said, reason="the syncer before it was not heard for 120 s")
    if n % EVALUATE_EVERY == 0:
        tokens = state.tokens(run.layout)
        return Evaluation(**said, evaluated=n - 1, loss=1.5 + 4 / (1 + tokens / 2e6), tokens=tokens)
    turn = n // 400
    names = [run.islands[(turn + PARTICIPANTS * i) % LEARNERS].name for i in range(PARTICIPANTS)]
    return resume.merge(run, state, said, dict.fromkeys(sorted(names), 1 + n // RESTART_EVERY))


def build(directory: Path, commits: int) -> RunFormat:
    run = resume.make_run(LEARNERS)
    resume.build(directory, commits, run, draft)
    (directory / FORMAT_KEY).write_bytes(encode(run))
    (directory / "heartbeat").mkdir()
    for island in run.islands:
        said = LearnerHeartbeat("TRAINING", 1, commits, 100, 0, 400.0, 0, 400.0, 1.5, 10**9, 2 * 10**9, 10**6)
        (directory / heartbeat_key(island.name)).write_bytes(encode(said))
    (directory / heartbeat_key(SYNCER)).write_bytes(encode(SyncerHeartbeat("SERVING", 1, commits, "bench")))
    return run


def timed(words: list[str], home: Path) -> tuple[float, float, float]:
    """(seconds, CPU seconds, MB at most) of one command."""
    measured = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    command = [sys.executable, "-c", measured, sys.executable, "-m", "diloco_cli", *words]
    started_s, variables = monotonic_s(), environment_with(DILOCO_HOME=str(home))
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    cpu_s, kilobytes = map(float, done.stdout.split())
    return monotonic_s() - started_s, cpu_s, kilobytes * 1024 / MB


def points(csv: Path) -> int:
    return len(csv.read_text().splitlines()) - 1


def cloud(directory: Path) -> Store:
    return EmulatedLink(LocalStore(directory), None, None, CLOUD_RTT_S)


def look_s(store: Store, run: RunFormat) -> float:
    """Seconds of what `status` reads."""
    started_s = monotonic_s()
    status_of(read_facts(store.url, run, store, CLOCK, most_batches=BATCHES_A_LOOK))
    return monotonic_s() - started_s


def history_s(store: Store, run: RunFormat, commits: int) -> float:
    """Seconds for so many commits, read as for a report and not folded."""
    started_s = monotonic_s()
    with CommitsAhead(store, last=commits) as ahead:
        for n in range(commits):
            ahead.get(commit_key(n), MAX_RECORD_BYTES)
    return monotonic_s() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="a directory for the log, used again where it is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory, home = options.keep or Path(folder) / "long", Path(folder) / "home"
        if not (directory / FORMAT_KEY).exists():
            started_s = monotonic_s()
            build(directory, options.commits)
            os.sync()
            print(f"{options.commits:,} commits, built in {monotonic_s() - started_s:.0f} s")
        print(machine())
        url, page, csv = f"file://{directory.absolute()}", Path(folder) / "report.html", Path(folder) / "report.csv"
        seconds, cpu_s, memory = timed(["report", url, "-o", str(page)], home)
        print(row("a report", [seconds], "< 10 s", seconds < 10))
        print(row("its CPU seconds", [cpu_s], "", None))
        print(row("its memory, MB", [memory], "< 500", memory < 500))
        print(row("its page, MB", [page.stat().st_size / MB], "< 3", page.stat().st_size < 3 * MB))
        timed(["report", url, "--format", "csv", "-o", str(csv)], home)
        print(row("points of a series", [points(csv)], f"<= {MAX_POINTS}", points(csv) <= MAX_POINTS, digits=0))
        looks = [timed(["status", url], home)[0] for _ in range(ROUNDS)]
        print(row("status", looks, "< 1 s", median(looks) < 1))
        run, far = resume.make_run(LEARNERS), cloud(directory)
        looks = [look_s(far, run) for _ in range(ROUNDS)]
        print(row("status, 40 ms a call", looks, "< 2 s", median(looks) < 2))
        read = min(IN_A_CLOUD, options.commits)
        print(row("a report, 40 ms a call", [history_s(far, run, read) * options.commits / read], "", None, 0))


if __name__ == "__main__":
    main()
