"""What a syncer costs while nothing happens: `python -m tests.benchmarks.idle`.

One syncer, learners that have joined and are silent, on a directory; with slots of 5 s it looks four times a second.
The product's loop runs as it is, on a clock whose sleeps pass at once: CPU time of the process against the time that
would have passed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.config.settings import RunSettings, SyncSettings, TrainSettings
from diloco_cli.forecast.stand_ins import TraceArithmetic
from diloco_cli.protocol.actors.syncer import NoEvaluator, Syncer
from diloco_cli.protocol.log.keys import FORMAT_KEY, incarnation_key
from diloco_cli.protocol.log.records import Island, ProcessClaim, RunFormat, encode
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.local import LocalStore
from diloco_cli.store.wrappers import MeteredStore
from tests.benchmarks.measure import machine, row
from tests.simulation.toy import run_of

FRAGMENTS = 24
SLOT_S = 5.0
WARM_S = 30.0  # of the clock: everything has been asked for at least once
GOAL_PERCENT = 1.0


class OverError(Exception):
    """Enough time has passed."""


@dataclass
class FastClock:
    """Implements protocol.driver.Clock. Notes the CPU time and the number of turns from `WARM_S` on."""

    end_s: float
    meter: MeteredStore
    passed_s: float = 0.0
    turns: int = 0
    cpu_s: float = 0.0
    requests: Counter[str] | None = None

    def now_s(self) -> float:
        return self.passed_s

    def sleep_s(self, seconds: float) -> None:
        self.passed_s += seconds
        if self.passed_s < WARM_S:
            return
        if self.requests is None:
            self.requests, self.cpu_s = Counter(self.meter.counts.requests), time.process_time()
        self.turns += 1
        if self.passed_s >= self.end_s:
            self.cpu_s = time.process_time() - self.cpu_s
            self.requests = Counter(self.meter.counts.requests) - self.requests
            raise OverError

    def check(self) -> None:
        pass


def make_run(learners: int) -> RunFormat:
    sync = SyncSettings(every=FRAGMENTS, fragments=FRAGMENTS)
    settings = RunSettings("idle", train=TrainSettings(tokens=10**12, batch_tokens=8), sync=sync)
    return run_of(settings, (Island(f"l{i:02d}", "here", 8, FRAGMENTS, 1.0, SLOT_S) for i in range(learners)))


def idle(learners: int, seconds: float) -> FastClock:
    """A syncer that serves so many silent learners for so long."""
    run = make_run(learners)
    with tempfile.TemporaryDirectory() as folder:
        meter = MeteredStore(LocalStore(Path(folder)))
        clock = FastClock(WARM_S + seconds, meter)
        claim = ProcessClaim(0, "nonce", "host", 1, "then", "bench")
        meter.create(FORMAT_KEY, encode(run))
        for island in run.islands:
            meter.create(incarnation_key(island.name, 1), encode(claim))
        syncer = Syncer(run, claim, TraceArithmetic(FRAGMENTS), NoEvaluator(), lambda: "then", lambda: "0" * 32)
        try:
            perform(syncer.serve(), meter, clock)
        except OverError:
            return clock
    raise RuntimeError("the run ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    found = [idle(options.learners, options.seconds) for _ in range(options.rounds)]
    percent = [100 * clock.cpu_s / options.seconds for clock in found]
    hertz = found[0].turns / options.seconds
    asked = sum((found[0].requests or Counter()).values()) / options.seconds
    figure = f"17 idle syncer, {options.learners} learners, {hertz:.1f} Hz, {asked:.1f} requests/s: % of a core"
    print(row(figure, percent, f"<= {GOAL_PERCENT:g} %", max(percent) <= GOAL_PERCENT))


if __name__ == "__main__":
    main()
