"""One process of a toy run: python -m tests.studies.toy_process learner|float-learner|syncer URL [NAME]

The product's own protocol code, threads, store clients, retries and signals, in processes without torch. What is the
toy's own is arithmetic: a learner's training port and wire, a syncer's merge.
"""

from __future__ import annotations

import json
import os
import sys
from array import array

from diloco_cli import __version__
from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.errors import DilocoError
from diloco_cli.protocol.actors.evaluating import NoEvaluator
from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commit_log import read_format
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.records import FragmentVersion, Mixing, ProcessClaim
from diloco_cli.protocol.log.state import RunState
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import Lanes, StopSignal, SystemClock, perform, say
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore
from tests.histories.integers import IntegerArithmetic
from tests.histories.learner import IntegerTraining, IntegerWire, LearnerProfile

CLOSES_WITHIN_S = 1.5  # each lane, once the run is over


class FloatWire:
    """Implements protocol.actors.ports.Wire: the integers of a learner travel as float32 tensors, as the product's
    codecs write them. `sizes`: the numbers in each fragment."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def encode(self, fragment: int, seq: int, applied: int | None, base: int, values: int) -> bytes:
        return float_payload(float(base - values), self._sizes[fragment])

    def decode(self, output: FragmentVersion, data: bytes) -> int:
        return round(array("f", data[-4:])[0])

    def mix(self, mixing: Mixing, merged: int, own: int, reference: int | None, last: bool = False) -> int:
        return merged if reference is None else merged + (own - reference)


def float_payload(value: float, elements: int) -> bytes:
    """A safetensors file with one tensor: `values`, [elements] float32, all the same."""
    entry = {"values": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}
    header = json.dumps(entry, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + array("f", [value]).tobytes() * elements


def run_learner(url: str, name: str, floats: bool, stop: StopSignal) -> None:
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
    sizes = tuple(fragment.num_parameters for fragment in run.layout.fragments)
    wire = FloatWire(sizes) if floats else IntegerWire(profile, run.settings.sync.error_feedback)
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
        store, sleep=stop.wait, stop=stop.is_set,
        on_retry=lambda failing: say(f"retrying {failing.verb}: {failing.last_error}"),
    )  # fmt: skip


def _claim() -> ProcessClaim:
    return ProcessClaim(0, nonce(), os.uname().nodename, os.getpid(), utc_now_text(), __version__)


def _end(error: BaseException) -> None:
    """The process's own exit status, from any thread."""
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
            run_learner(url, names[0], role == "float-learner", stop)
    except Exception as error:
        _end(error)


if __name__ == "__main__":
    main()
