"""One process of a toy run: python -m tests.studies.toy_process learner|syncer URL [NAME]

The product's own protocol code, threads, store clients, retries and signals, in processes without torch, which start in
a third of a second. What is the toy's own is arithmetic: a learner's training port and wire, a syncer's merge.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from diloco_cli import __version__
from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import EvaluationSettings, RetentionSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.errors import DilocoError
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.actors.syncer import NoEvaluator, Syncer
from diloco_cli.protocol.log.commit_log import read_format
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.records import Island, ProcessClaim, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import Lanes, StopSignal, SystemClock, perform, say
from diloco_cli.signing import Checksummed
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore
from diloco_cli.store.wrappers import StoreWrapper, T
from tests.histories.integers import IntegerArithmetic
from tests.histories.learner import IntegerTraining, IntegerWire, LearnerProfile

CLOSES_WITHIN_S = 1.5  # each lane, once the run is over
ROOT = Path(__file__).resolve().parents[2]
LEARNERS = ("l0", "l1", "l2")
FRAGMENTS = 4
LOCAL_STEPS = 8
BATCH_TOKENS = 16
BAD_READS = "TOY_BAD_READS"


class BadReads(StoreWrapper):
    """This share of what it reads is cut short, or has a flipped bit."""

    def __init__(self, store: Store, share: float) -> None:
        super().__init__(store)
        self._share, self._random = share, random.Random()

    def _around(self, verb: str, key: str, call: Callable[[], T], num_bytes: int = 0) -> T:
        found = call()
        if isinstance(found, bytes) and found and self._random.random() < self._share:
            place = self._random.randrange(len(found))
            flipped = found[:place] + bytes([found[place] ^ 1]) + found[place + 1 :]
            return self._random.choice((found[:place], flipped))  # type: ignore[return-value]
        return found


def spawned(log: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    """`python -m WORDS`, whose words go to this log."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=out, stderr=out, env=environment)


def integer_run(rounds: int, step_s: float, retention: RetentionSettings) -> RunFormat:
    """Three equal islands and four fragments, each of one integer (histories/integers.py)."""
    settings = RunSettings(
        name="toy",
        train=TrainSettings(tokens=rounds * len(LEARNERS) * LOCAL_STEPS * BATCH_TOKENS, batch_tokens=BATCH_TOKENS),
        sync=SyncSettings(every=LOCAL_STEPS, fragments=FRAGMENTS, quorum=2, skip_after_s=2.0),
        retention=retention,
        evaluation=EvaluationSettings(every=1 << 20),
    )
    layout = balanced_layout([ParameterFact(f"w{index}", (1,), False) for index in range(FRAGMENTS)], FRAGMENTS)
    tokens_per_s = BATCH_TOKENS / step_s
    islands = tuple(Island(name, "here", BATCH_TOKENS, LOCAL_STEPS, tokens_per_s, step_s) for name in LEARNERS)
    run_id = nonce()
    made = RunFormat(run_id, settings.name, "2026-01-01T00:00:00.000Z", settings, islands, layout, "test")
    return replace(made, checksums=True, keyring=Checksummed(run_id))


def run_learner(url: str, name: str, stop: StopSignal) -> None:
    """The product's learner in the product's threads; its model is one integer a fragment."""
    store = _background_store(open_store(url), stop)
    lanes = Lanes(store, SystemClock(monotonic_s, stop.wait, stop.check))

    def check() -> None:
        lanes.check()
        stop.check()

    clock = SystemClock(monotonic_s, stop.wait, check)
    run = perform(read_format(url), store, clock)
    island = run.island(name)
    assert island is not None
    profile = LearnerProfile(island.step_s)
    wire = IntegerWire(profile, run.settings.sync.error_feedback)
    training = IntegerTraining(name, run.num_fragments, profile)
    learner = Learner(run, name, _claim(), training, wire, nonce, lanes.start)
    perform(learner.train(), store, clock)
    lanes.close(CLOSES_WITHIN_S)


def run_syncer(url: str, stop: StopSignal) -> None:
    bare = open_store(url)
    store = _background_store(bare, stop)
    clock = SystemClock(monotonic_s, stop.wait, stop.check)
    run = perform(read_format(url), store, clock)

    def told(state: RunState, commit: Commit) -> None:
        say(f"{commit.time} commit {commit.n} {commit.kind}")

    syncer = Syncer(run, _claim(), IntegerArithmetic(run), NoEvaluator(), utc_now_text, nonce, told)
    perform(syncer.serve(), store, clock, tries_once=bare)


def _background_store(store: Store, stop: StopSignal) -> RetryingStore:
    return RetryingStore(
        BadReads(store, float(os.environ.get(BAD_READS, "0"))), sleep=stop.wait, stop=stop.is_set,
        on_retry=lambda failing: say(f"retrying {failing.verb}: {failing.last_error}"),
    )  # fmt: skip


def _claim() -> ProcessClaim:
    return ProcessClaim(0, nonce(), os.uname().nodename, os.getpid(), utc_now_text(), __version__)


def _end(error: BaseException) -> None:
    """The process's own exit status, from any thread."""
    traceback.print_exception(error)
    say(f"error: {type(error).__name__}: {error}")
    os._exit(error.exit_status if isinstance(error, DilocoError) else 1)


def main() -> None:
    role, url, *names = sys.argv[1:]
    stop = StopSignal()
    stop.hear_signals()
    try:
        if role == "syncer":
            run_syncer(url, stop)
        else:
            run_learner(url, names[0], stop)
    except Exception as error:
        _end(error)


if __name__ == "__main__":
    main()
