"""`diloco syncer`: serves one run until it is over."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from diloco_cli import __version__
from diloco_cli.clock import monotonic_s, utc_now_text
from diloco_cli.errors import NoSpaceError, StoreError
from diloco_cli.processes.daemon import Stopping, say
from diloco_cli.protocol.driver import SystemClock, perform
from diloco_cli.protocol.keys import SYNCER, beat_key
from diloco_cli.protocol.log import read_format
from diloco_cli.protocol.records import Commit, ProcessClaim, RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.syncer import Syncer
from diloco_cli.protocol.wire import RecordError, decode_plain
from diloco_cli.randomness import nonce
from diloco_cli.store.metered import MeteredStore
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.store.retry import RetryingStore, retrying_text
from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.syncer.evaluation import EvaluatorProcess
from diloco_cli.syncer.rebuild import rebuilt_state


def run_syncer(url: str) -> int:
    """Exit status: 0 when the run is over. Raises TerminatedError (143) after SIGTERM, FencedError (9) when another
    syncer took over."""
    stop = Stopping()
    stop.hear_signals()
    torch.set_num_threads(1)  # one thread: sums in one order, and cores for the learners
    meter = MeteredStore(open_store(url))
    store = RetryingStore(meter, sleep=stop.wait, stop=stop.is_set)
    clock = SystemClock(monotonic_s, stop.wait, stop.check)
    run = perform(read_format(url), store, clock)
    evaluator = EvaluatorProcess(url)
    syncer = Syncer(
        run,
        ProcessClaim(0, nonce(), os.uname().nodename, os.getpid(), utc_now_text(), __version__),
        TorchArithmetic(run),
        evaluator,
        time_text=utc_now_text,
        nonce=nonce,
        on_commit=lambda state, commit: _log_commit(run, state, commit),
        recover=lambda output: rebuilt_state(run, store, output),
        beat_facts=_beat_facts(meter, store),
    )
    try:
        perform(syncer.serve(), store, clock)
    except (StoreError, NoSpaceError):
        stop.check()  # a stop ends the retrying of a store that fails: that is no failure of this syncer
        raise
    finally:
        evaluator.close()
    return 0


def _beat_facts(meter: MeteredStore, store: RetryingStore) -> Any:
    """What only this process knows, added to the syncer's beat; counts go on from an earlier process's."""
    earlier = _earlier(store)
    process = psutil.Process()

    def facts() -> dict[str, Any]:
        counts = meter.counts
        return {
            "up_bytes": counts.bytes_up + earlier.get("up_bytes", 0),
            "down_bytes": counts.bytes_down + earlier.get("down_bytes", 0),
            "requests": counts.num_requests + earlier.get("requests", 0),
            "memory_bytes": process.memory_info().rss,
            "retrying": retrying_text(store),
        }

    return facts


def _earlier(store: Store) -> dict[str, int]:
    data = store.get(beat_key(SYNCER))
    try:
        plain = decode_plain(data, beat_key(SYNCER)) if data is not None else {}
    except RecordError:
        return {}
    return {key: value for key, value in plain.items() if isinstance(value, int)}


def _log_commit(run: RunFormat, state: RunState, commit: Commit) -> None:
    """One plain line a commit, for `diloco logs syncer`."""
    names = ",".join(item.learner for item in commit.inputs)
    refused = ", ".join(f"{fate.learner} {fate.reason}" for fate in commit.fates)
    parts = [
        commit.time,
        f"commit {commit.n} {commit.kind}",
        f"slot {commit.slot}" if commit.slot is not None else "",
        f"[{names}]" if names else "",
        f"loss {commit.loss:.4f}" if commit.loss is not None else "",
        f"tokens {state.tokens(run.layout):,}" if commit.kind in ("merge", "finish") else "",
        commit.reason,
        f"refused: {refused}" if refused else "",
    ]
    say(" ".join(part for part in parts if part))
