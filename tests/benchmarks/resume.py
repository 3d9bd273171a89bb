"""A long log, built commit by commit with the product's own records, without a syncer and without fsync; and how many
reads it takes to open it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco_cli.clock import monotonic_s
from diloco_cli.config.settings import RunSettings, SyncSettings, TrainSettings
from diloco_cli.digests import digest
from diloco_cli.protocol.log.commit_log import SNAPSHOT_EVERY, HeadHint, Snapshot, fold, read_log
from diloco_cli.protocol.log.commits import Commit, EpochStart, Merge
from diloco_cli.protocol.log.keys import HEAD_HINT_KEY, commit_key, snapshot_key
from diloco_cli.protocol.log.records import FragmentVersion, Island, MergedOffer, RunFormat, encode, fragment_of_slot
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.local import LocalStore
from diloco_cli.store.wrappers import MeteredStore
from tests.simulation.toy import run_of

BATCH = 1000


def make_run(learners: int = 8, fragments: int = 24) -> RunFormat:
    sync = SyncSettings(every=fragments, fragments=fragments)
    settings = RunSettings("long", train=TrainSettings(tokens=10**15, batch_tokens=BATCH), sync=sync)
    return run_of(settings, (Island(f"l{i}", "here", BATCH, fragments, 1.0, 1.0) for i in range(learners)), 1000)


def build(
    directory: Path,
    commits: int,
    run: RunFormat | None = None,
    draft: Callable[[RunFormat, RunState], Commit] | None = None,
) -> RunFormat:
    """Commit 0 with every fragment's first version, then merges of two learners each (or what `draft` makes of the
    state), and a snapshot now and then."""
    run, state, draft = run or make_run(), RunState(), draft or next_commit
    for folder in ("commit", "snapshot", "hint"):
        (directory / folder).mkdir(parents=True)
    while state.n + 1 < commits:
        data = encode(draft(run, state))
        (directory / commit_key(state.n + 1)).write_bytes(data)
        state = fold(run, state, data)
        if state.n % SNAPSHOT_EVERY == 0:
            (directory / snapshot_key(state.n)).write_bytes(encode(Snapshot(state, state.digest, run.run_id)))
            (directory / HEAD_HINT_KEY).write_bytes(encode(HeadHint(state.n)))
    return run


def header(state: RunState, time: str = "2026-01-01T00:00:00.000Z", epoch: int = 1) -> dict[str, Any]:
    n = state.n + 1
    return {
        "n": n, "epoch": epoch, "nonce": f"{n:032x}", "previous": state.digest, "time": time, "software": "bench",
    }  # fmt: skip


def first(run: RunFormat, said: dict[str, Any]) -> EpochStart:
    name = digest(b"first")
    return EpochStart(**said, outputs=tuple(FragmentVersion(f, 0, -1, 1, name, name) for f in range(run.num_fragments)))


def merge(run: RunFormat, state: RunState, said: dict[str, Any], who: Mapping[str, int]) -> Merge:
    """The next slot's, of these learners in these incarnations."""
    slot, name = state.slot, digest(b"%d" % state.n)
    fragment = fragment_of_slot(slot, run.num_fragments)
    inputs = tuple(
        MergedOffer(
            learner, incarnation, slot, state.outputs[fragment].version, BATCH * slot, BATCH * (slot + 1), BATCH, 1,
            1e6, name, 4000, 1.0, norm=1.0,
        )
        for learner, incarnation in who.items()
    )  # fmt: skip
    outputs = (FragmentVersion(fragment, state.n + 1, slot, said["epoch"], name, name),)
    tokens = len(inputs) * BATCH
    return Merge(**said, slot=slot, inputs=inputs, outputs=outputs, tokens=tokens, quorum=1, alive=len(inputs))


def next_commit(run: RunFormat, state: RunState, learners: int = 2) -> Commit:
    said = header(state)
    return first(run, said) if state.n < 0 else merge(run, state, said, {i.name: 1 for i in run.islands[:learners]})


def opened(directory: Path, run: RunFormat) -> tuple[Counter[str], RunState]:
    """(requests by verb, the state found)."""
    meter = MeteredStore(LocalStore(directory))
    clock = SystemClock(monotonic_s, lambda seconds: None, lambda: None)
    state = perform(read_log(run), meter, clock)
    return Counter(meter.counts.requests), state


def lose_hint(directory: Path) -> None:
    (directory / HEAD_HINT_KEY).unlink()


def age_hint(directory: Path) -> None:
    (directory / HEAD_HINT_KEY).write_bytes(encode(HeadHint(SNAPSHOT_EVERY)))


def damage_newest(directory: Path) -> None:
    newest = max((directory / "snapshot").iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
