"""Real learners and a real syncer go back to an earlier commit and forget what lies behind: verified bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings, OuterSettings, RetentionSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier, rebuilt_state, verified
from diloco_cli.protocol.actors import collection, syncer
from diloco_cli.protocol.actors.learner import Learner, Observer, Phase
from diloco_cli.protocol.actors.requests import ask
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key
from diloco_cli.protocol.log.records import RequestKind, RunFormat, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from tests.numerics.harness import (
    CLOCK,
    Threads,
    TrainingProcess,
    commits,
    copy_of,
    key_of_delta,
    key_of_state,
    key_of_weights,
    make_run,
    merges,
    process_of,
    serve,
)
from tests.waiting import wait_until

ADAMW = InnerSettings(lr=0.02, warmup_steps=0, save_every=1)
TO, LATER = 6, 16


def head(run: RunFormat, store: Store) -> RunState:
    return perform(read_log(run), store, CLOCK)


def request(run: RunFormat, store: Store, kind: RequestKind, to: int | None = None) -> RunState:
    number = perform(ask(head(run, store), kind, kind, "then", "wanted", to=to), store, CLOCK)
    wait_until(lambda: head(run, store).next_request > number)
    return head(run, store)


@dataclass
class SeenOperations:
    """What the learners did with their moments when the run went back (the optimizer's step, as of before and after;
    whether they were lost), and the bucket some merges later, with everything still in it."""

    steps: dict[str, tuple[float, float]] = field(default_factory=dict)
    lost: dict[str, bool] = field(default_factory=dict)
    whole: MemoryStore = field(default_factory=MemoryStore)


def operated() -> tuple[RunFormat, MemoryStore, SeenOperations]:
    """Back to commit TO; a collection once enough has been merged again; stopped."""
    sync = SyncSettings(every=4, fragments=2, quorum=2)
    run = make_run(2, 4000, sync, OuterSettings("nesterov", 0.7, 0.9), ADAMW)
    run = replace(run, settings=replace(run.settings, retention=RetentionSettings("all", grace_s=0.0)))
    store, seen, threads = MemoryStore(), SeenOperations(), Threads()
    store.create(FORMAT_KEY, encode(run))
    threads.start(serve, run, store)
    for island in run.islands:
        threads.start(learn, run, store, island.name, seen)
    wait_until(lambda: head(run, store).n >= LATER)
    back = request(run, store, "rollback", to=TO)
    wait_until(lambda: head(run, store).n >= back.base_floor + 24)
    seen.whole = copy_of(store)
    request(run, store, "gc")
    wait_until(lambda: not [key for key in store.list("state/0000/") if f"{TO:012d}" in key])
    request(run, store, "stop")
    threads.join(20)
    return run, store, seen


class Noting(Observer):
    """Compares the optimizer before and after the run went back."""

    def __init__(self, name: str, seen: SeenOperations) -> None:
        self.name, self.seen = name, seen
        self.process: TrainingProcess
        self.before = 0.0

    def took(self, phase: Phase, seconds: float) -> None:
        if phase == "step":
            self.before = optimizer_step(self.process.training.replica.optimizer)

    def rolled_back(self, learner: Learner, to: int) -> None:
        self.seen.steps[self.name] = (self.before, optimizer_step(self.process.training.replica.optimizer))
        self.seen.lost[self.name] = learner.moments_lost


def learn(run: RunFormat, store: Store, name: str, seen: SeenOperations) -> None:
    noting = Noting(name, seen)
    noting.process = process_of(run, store, name, observer=noting)
    noting.process.train()


def optimizer_step(optimizer: torch.optim.Optimizer) -> float:
    return max((float(known["step"]) for known in optimizer.state.values() if known), default=0.0)


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[RunFormat, MemoryStore, SeenOperations]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(syncer, "SNAPSHOT_EVERY", 5)
    patch.setattr(collection, "FLOORS_APART", 3)
    yield operated()
    patch.undo()


Bucket = tuple[RunFormat, MemoryStore, SeenOperations]


def test_a_run_that_went_back_and_forgot_is_verified_from_its_floor(bucket: Bucket) -> None:
    run, store, _ = bucket
    found = LogVerifier(store, run).replay()
    assert found.ok, (found.missing, found.mismatches)
    state = head(run, store)
    assert found.floor == state.gc_floor > state.base_floor > LATER
    assert found.tokens == state.tokens(run.layout)


def test_tokens_are_those_of_the_offers_that_count(bucket: Bucket) -> None:
    run, store, _ = bucket
    (back,) = [commit for commit in commits(store) if commit.kind == "rollback"]
    sizes = [fragment.num_parameters for fragment in run.layout.fragments]
    counted = [commit for commit in merges(store) if not TO < commit.n < back.n]
    total = sum(item.counted * sizes[c.outputs[0].fragment] for c in counted for item in c.inputs)
    assert head(run, store).token_parameters == total


def test_learners_went_on_with_moments_from_before_or_with_none(bucket: Bucket) -> None:
    _, _, seen = bucket
    assert set(seen.steps) == {"l0", "l1"}
    for name, (before, after) in seen.steps.items():
        assert after < before and seen.lost[name] == (after == 0)


def test_nothing_that_a_replay_from_the_floor_needs_may_be_missing(bucket: Bucket) -> None:
    run, store, _ = bucket
    floor = head(run, store).gc_floor
    later = next(commit for commit in merges(store) if commit.n > floor)
    for key in (key_of_delta(later.inputs[0]), key_of_state(later.outputs[0])):
        damaged = copy_of(store)
        damaged.delete(key)
        assert key in LogVerifier(damaged, run).replay().missing


class CollectedMeanwhile(MemoryStore):
    """The whole bucket for so many reads; then the one whose floor has risen and whose garbage is gone."""

    def __init__(self, whole: MemoryStore, after: MemoryStore, num_reads: int) -> None:
        super().__init__()
        self.whole, self.after, self.reads_left = whole, after, num_reads

    @property
    def now(self) -> MemoryStore:
        self.reads_left -= 1
        return self.whole if self.reads_left >= 0 else self.after

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        return self.now.get(key, max_bytes)

    def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[str]:
        return self.now.list(prefix, after, limit)


@pytest.mark.parametrize("num_reads", [3, 90])
def test_a_replay_that_a_collection_overtakes_starts_over_from_the_new_floor(bucket: Bucket, num_reads: int) -> None:
    run, store, seen = bucket
    found = verified(CollectedMeanwhile(seen.whole, store, num_reads), run)
    assert found.ok, (found.missing, found.mismatches)
    assert found.floor == head(run, store).gc_floor > 0


def test_what_is_missing_above_a_floor_that_stays_is_found_at_once(bucket: Bucket) -> None:
    run, store, _ = bucket
    damaged = copy_of(store)
    damaged.delete(key_of_weights(head(run, store).outputs[0]))
    assert len(verified(damaged, run).missing) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plain: plain.update(to=TO - 1), "other shares"),
        (lambda plain: plain["shares"][0].__setitem__(1, 1), "other shares"),
        (lambda plain: plain.update(to=10**6), "which is not there"),
        (lambda plain: plain.pop("to"), "missing required field `to`"),
        (lambda plain: plain["outputs"][0].update(state_digest="blake3-" + "0" * 64), "is not what it was"),
    ],
)
def test_a_rollback_that_says_other_things_than_the_log_is_named(
    bucket: Bucket, change: Callable[[dict[str, object]], object], words: str
) -> None:
    run, store, _ = bucket
    damaged = copy_of(store)
    (key,) = [commit_key(commit.n) for commit in commits(store) if commit.kind == "rollback"]
    plain = json.loads(store.get(key) or b"")
    change(plain)
    damaged.put(key, encode(plain))
    assert any(key in text and words in text for text in LogVerifier(damaged, run).replay().mismatches)


def test_a_lost_state_is_computed_anew_through_a_rollback(bucket: Bucket) -> None:
    """Every state since the target is gone: the way leads from there over the merges that count."""
    run, _, seen = bucket
    for output in head(run, seen.whole).outputs:
        damaged = copy_of(seen.whole)
        for key in damaged.list(f"state/{output.fragment:04d}/", after=f"state/{output.fragment:04d}/{TO + 1:012d}"):
            damaged.delete(key)
        key = key_of_state(output)
        assert damaged.get(key) is None and output.version > LATER
        assert rebuilt_state(run, damaged, output) == seen.whole.get(key)


def test_with_everything_in_place_the_whole_log_is_replayed_through_the_rollback(bucket: Bucket) -> None:
    run, _, seen = bucket
    found = LogVerifier(seen.whole, run).replay()
    assert found.ok and found.floor == 0, (found.missing, found.mismatches)
