"""Runs through servers that fail: python -m tests.studies.server_faults [--store gs|s3] [--fault NAME ...] [--quick]

For each fault one run of four processes: `diloco syncer` as it is, and three toy learners with the product's protocol
code and store clients. They reach the bucket (the fake GCS, the S3 emulator) through a proxy that breaks what passes.
A run must end with the tokens that were asked for (overshoot at most what the learners may train while they hear
nothing: the drift bound), and `verify` must find every digest in place. Prints one row of the table in README.md a run,
and one for all of them together; ends with status 1 if any of them failed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.launch.new_run import layout_of
from diloco_cli.observe.replay import Replay, verified
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import encode
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from tests.contract.emulators import S3_ENVIRONMENT, environment, s3_emulator
from tests.contract.fake_gcs import FakeGCS
from tests.contract.fault_proxy import FaultProxy
from tests.contract.faults import Faults, Kind
from tests.studies.toy_runs import LEARNERS, ROUND_TOKENS, SYNC, float_run, spawned
from tests.studies.verifying import problems_of

CLOCK = SystemClock(monotonic_s, sleep_s, lambda: None)
BUCKET = "bucket"
ROUNDS, QUICK_ROUNDS = 8, 4
STEP_S = 0.1
ELEMENTS = 4096
LIMIT_S = 600.0
OUTAGE_AFTER_COMMITS = 6
HEADER = (
    "| fault | store | merges | tokens (asked for) | wall | requests | spoilt | verify |\n"
    "|---|---|---|---|---|---|---|---|"
)

StoreKind = Literal["gs", "s3"]


@dataclass(frozen=True)
class ServerFault:
    """`rates`: each request's chance, all the run long; `outage_s`: nobody is served for so long, once."""

    rates: dict[Kind, float]
    outage_s: float = 0.0


FAULTS: dict[str, ServerFault] = {
    "none": ServerFault({}),
    "503 storm": ServerFault({"503": 0.2}),
    "429 storm": ServerFault({"429": 0.2}),
    "stalls": ServerFault({"stall": 0.003}),
    "cut bodies": ServerFault({"cut_body": 0.2}),
    "lost answers": ServerFault({"lost_answer": 0.2}),
    "flipped bits": ServerFault({"flip_bit": 0.2}),
    "everything": ServerFault(
        {"503": 0.1, "429": 0.05, "409": 0.05, "lost_answer": 0.1, "cut_body": 0.1, "flip_bit": 0.05, "stall": 0.001}
    ),
    "outage 10 s": ServerFault({}, 10.0),
    "outage 30 s": ServerFault({}, 30.0),
    "outage 120 s": ServerFault({}, 120.0),
}
QUICK = ("503 storm", "lost answers")


@dataclass(frozen=True)
class FaultRow:
    fault: str
    store: StoreKind
    asked: int
    wall_s: float
    requests: int
    spoilt: int
    failures: tuple[str, ...]
    found: Replay

    @property
    def problems(self) -> list[str]:
        """Why this run counts as failed; nothing if it does not."""
        wrong = [*self.failures, *problems_of(self.found)]
        if not self.asked <= self.found.tokens <= self.asked + SYNC.drift_rounds * ROUND_TOKENS:
            wrong.append(f"{self.found.tokens} tokens where {self.asked} were asked for")
        return wrong

    def text(self) -> str:
        cells = [
            self.fault, self.store, str(self.found.merges), f"{self.found.tokens:,} ({self.asked:,})",
            f"{self.wall_s:.0f} s", f"{self.requests:,}", f"{self.spoilt:,}", "; ".join(self.problems) or "ok",
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[FaultRow]) -> str:
    """All runs as one row."""
    failed = sum(bool(row.problems) for row in rows)
    cells = [
        f"{len(rows)} runs", " and ".join(sorted({r.store for r in rows})), f"{sum(r.found.merges for r in rows):,}",
        f"{sum(r.found.tokens for r in rows):,} ({sum(r.asked for r in rows):,})",
        f"{sum(r.wall_s for r in rows):.0f} s", f"{sum(r.requests for r in rows):,}",
        f"{sum(r.spoilt for r in rows):,}", f"{failed} failed" if failed else "ok",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


@dataclass
class EmulatedBucket:
    """An emulated service: this process reaches it undisturbed, the run's processes through the proxy."""

    kind: StoreKind
    proxy: FaultProxy

    def variables(self) -> dict[str, str]:
        name = "STORAGE_EMULATOR_HOST" if self.kind == "gs" else "AWS_ENDPOINT_URL"
        return {name: self.proxy.url}

    @property
    def faults(self) -> Faults:
        return self.proxy.faults


@contextmanager
def emulated(kind: StoreKind) -> Iterator[EmulatedBucket]:
    with ExitStack() as stack:
        if kind == "gs":
            upstream = stack.enter_context(FakeGCS(BUCKET)).url
            stack.enter_context(environment({"STORAGE_EMULATOR_HOST": upstream}))
        else:
            upstream = stack.enter_context(s3_emulator(BUCKET))
            stack.enter_context(environment({"AWS_ENDPOINT_URL": upstream, **S3_ENVIRONMENT}))
        yield EmulatedBucket(kind, stack.enter_context(FaultProxy(upstream)))


class FourProcesses:
    """The syncer and three learners of one run, from their start to their end."""

    def __init__(self, bucket: EmulatedBucket, run: RunFormat) -> None:
        self.bucket, self.run = bucket, run
        self.url = f"{bucket.kind}://{BUCKET}/runs/{nonce()}"
        self.store: Store = open_store(self.url)
        self.store.create(FORMAT_KEY, encode(run))
        self.state = RunState()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, logs: Path) -> None:
        syncer = ["diloco_cli", "syncer", f"--run={self.url}", "--allow-code=tests.studies.toy_task"]
        learners = {name: ["tests.studies.toy_process", "float-learner", self.url, name] for name in LEARNERS}
        variables = {**self.bucket.variables(), "DILOCO_HOME": str(logs / "home")}
        for name, words in {"syncer": syncer, **learners}.items():
            self.processes[name] = spawned(logs / f"{name}.log", *words, **variables)

    def wait(self, fault: ServerFault) -> list[str]:
        """Until all of them have ended; why they should have ended otherwise."""
        ends_s = time.monotonic() + LIMIT_S
        outage_s = fault.outage_s
        while time.monotonic() < ends_s:
            self.state = perform(read_log(self.run, self.state), self.store, CLOCK)
            if outage_s and self.state.n >= OUTAGE_AFTER_COMMITS:
                self.bucket.faults.start_outage(outage_s)
                outage_s = 0.0
            ends = {name: process.poll() for name, process in self.processes.items()}
            wrong = [f"{name} ended with status {end}" for name, end in ends.items() if end not in (None, 0)]
            if wrong or all(end == 0 for end in ends.values()):
                return wrong
            time.sleep(0.2)
        return [f"not over after {LIMIT_S:.0f} s, at commit {self.state.n}"]

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def run_through(bucket: EmulatedBucket, name: str, fault: ServerFault, rounds: int, logs: Path) -> FaultRow:
    """One run under one fault."""
    run = float_run(rounds, STEP_S, ELEMENTS)
    run = replace(run, layout=layout_of(run.settings))
    processes, faults = FourProcesses(bucket, run), bucket.faults
    requests, spoilt = faults.requests, faults.struck.total()
    faults.set_rates(fault.rates)
    began_s = time.monotonic()
    try:
        processes.start(logs)
        failures = processes.wait(fault)
    finally:
        wall_s = time.monotonic() - began_s
        processes.end()
        faults.heal()
    requests, spoilt = faults.requests - requests, faults.struck.total() - spoilt
    found = verified(processes.store, run)
    return FaultRow(name, bucket.kind, run.settings.train.tokens, wall_s, requests, spoilt, tuple(failures), found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", choices=get_args(StoreKind), help="default: both, one after the other")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="default: all; may be given several times")
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)} alone, {QUICK_ROUNDS} rounds each")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *about: sys.exit(143))  # so that nothing that was started stays behind
    names = arguments.fault or (QUICK if arguments.quick else tuple(FAULTS))
    kinds: tuple[StoreKind, ...] = (arguments.store,) if arguments.store else get_args(StoreKind)
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    rows: list[FaultRow] = []
    print(HEADER, flush=True)
    for kind in kinds:
        with emulated(kind) as bucket:
            for name in names:
                logs = Path(tempfile.mkdtemp(prefix="server-faults-"))
                rows.append(row := run_through(bucket, name, FAULTS[name], rounds, logs))
                print(row.text(), flush=True)
                if row.problems:
                    print(f"logs of {row.fault}: {logs}", file=sys.stderr)
                else:
                    shutil.rmtree(logs)
    print(summary(rows), flush=True)
    sys.exit(1 if any(row.problems for row in rows) else 0)


if __name__ == "__main__":
    main()
