"""The mirror of a region alone, between two buckets: where it begins, and what that costs on a long log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.digests import digest
from diloco_cli.protocol.log.commit_log import SNAPSHOT_EVERY, append, write_snapshot
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import (
    FORMAT_KEY,
    HEAD_HINT_KEY,
    commit_key,
    snapshot_key,
    weights_key,
)
from diloco_cli.protocol.log.operations import Create, Operation, Steps, There
from diloco_cli.protocol.log.records import RecordError, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.regions import Mirror, RegionStoppedError
from diloco_cli.signing import NOBODY, Authenticator, Signature
from diloco_cli.store.memory import MemoryStore
from diloco_cli.virtual.world import LATENCY_S, Actor
from tests.faulty_world import FaultyWorld
from tests.unit.protocol.records import RUN, commit, output

LENGTH = 10 * SNAPSHOT_EVERY + 10


WEIGHTS = (b"weights of 0", b"weights of 1")


def long_log() -> Steps[list[RunState]]:
    """Versions, then commits that bring none, and a snapshot every so often."""
    states = [RunState()]
    outputs = tuple(replace(output(i, 0, -1), weights_digest=digest(weights)) for i, weights in enumerate(WEIGHTS))
    for made, weights in zip(outputs, WEIGHTS, strict=True):
        yield Create(weights_key(made.fragment, made.version, made.epoch, made.weights_digest), weights)
    for _ in range(LENGTH):
        first: Commit = commit(states[-1], "epoch_start", outputs=outputs)
        draft = first if states[-1].n < 0 else commit(states[-1], "refuse", reason="nothing")
        state, _mine = yield from append(RUN, states[-1], draft)
        states.append(state)
        if state.n > 0 and state.n % SNAPSHOT_EVERY == 0:
            yield from write_snapshot(RUN, state)
    return states


class MirrorBench:
    """Home has collected all but its two newest snapshots; the region has the log up to some commit."""

    def __init__(self) -> None:
        self.far, self.reads = MemoryStore(), list[tuple[bool, str]]()
        self.world = FaultyWorld(latency_s=self._noted, store_of=self._store_of)
        self.home = self.world.store
        self.home.create(FORMAT_KEY, encode(RUN))
        writer = self.world.start("writer", long_log())
        assert self.world.run(lambda: writer.ended, 100.0) and writer.error is None
        self.states: list[RunState] = writer.result
        self.snapshots = {key: self.home.get(key) or b"" for key in self.home.list("snapshot/")}
        for key in self.home.list("snapshot/"):
            if key < f"snapshot/{LENGTH - 2 * SNAPSHOT_EVERY:012d}":
                self.home.delete(key)

    def fill(self, last: int, snapshot: int | None) -> None:
        self.far.create(FORMAT_KEY, encode(RUN))
        for n in range(last + 1):
            self.far.create(commit_key(n), self.home.get(commit_key(n)) or b"")
        if snapshot is not None:
            self.far.create(snapshot_key(snapshot), self.snapshots[snapshot_key(snapshot)])

    def mirror(self, until: int | None = None) -> Actor:
        """A new process, until the region has commit `until`, or all of them."""
        self.reads.clear()
        mirror = Mirror(RUN, lambda: self.states[-1], lambda: True)
        actor = self.world.start("mirror", mirror.serve())
        last = commit_key(LENGTH - 1 if until is None else until)
        self.world.run(lambda: actor.ended or (until is not None and self.far.get(last) is not None), 100.0)
        self.world.kill(actor)
        return actor

    def read_commits(self, there: bool) -> list[int]:
        return [int(key[7:19]) for far, key in self.reads if far == there and key.startswith("commit/")]

    def _noted(self, actor: Actor, operation: Operation) -> float:
        inner = operation.operation if isinstance(operation, There) else operation
        if type(inner).__name__ in ("Get", "List"):
            self.reads.append((isinstance(operation, There), str(getattr(inner, "key", getattr(inner, "prefix", "")))))
        return LATENCY_S

    def _store_of(self, actor: Actor, operation: Operation) -> MemoryStore:
        return self.far if isinstance(operation, There) else self.home  # type: ignore[return-value]


@pytest.mark.parametrize("hint", [None, b"nonsense", b'{"snapshot":0}', b'{"snapshot":64}', b'{"snapshot":999}'])
def test_a_mirror_goes_on_from_what_its_region_shows_whatever_is_left_at_home(hint: bytes | None) -> None:
    """The region's newest snapshot is of commit 128, and home's of that time is gone."""
    bench = MirrorBench()
    bench.fill(last=130, snapshot=128)
    if hint is not None:
        bench.far.put(HEAD_HINT_KEY, hint)
    assert bench.mirror().error is None
    assert bench.far.list("commit/") == bench.home.list("commit/")
    assert min(bench.read_commits(there=False)) == min(bench.read_commits(there=True)) == 128
    copied = LENGTH - 128
    assert len(bench.reads) <= copied + copied // SNAPSHOT_EVERY + 20


def test_a_first_copy_that_was_interrupted_does_not_begin_anew() -> None:
    bench = MirrorBench()
    bench.mirror(until=400)
    assert bench.mirror().error is None
    assert bench.far.list("commit/") == bench.home.list("commit/")
    assert min(bench.read_commits(there=False)) >= 400 - SNAPSHOT_EVERY
    assert len(bench.reads) <= (LENGTH - 400) + 2 * SNAPSHOT_EVERY + 40
    assert bench.far.get(HEAD_HINT_KEY) == bench.home.get(HEAD_HINT_KEY)
    newest = bench.home.list("snapshot/")[-1]
    assert bench.far.get(newest) == bench.home.get(newest)
    for key in bench.far.list("snapshot/"):
        assert bench.far.get(key) == bench.snapshots[key], "equal logs fold to equal states"


def test_a_region_that_is_complete_costs_a_few_reads_at_any_age() -> None:
    bench = MirrorBench()
    bench.fill(last=LENGTH - 1, snapshot=10 * SNAPSHOT_EVERY)
    assert bench.mirror().error is None
    assert len(bench.reads) <= 2 * 10 + 20


class NotJunk(Authenticator):
    def signature(self, role: str, key: str, data: bytes) -> Signature | None:
        return None if data == b"junk" else NOBODY


def test_what_somebody_puts_in_the_place_of_a_snapshot_at_home_stops_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RUN", replace(RUN, keyring=NotJunk()))
    bench = MirrorBench()
    last = 10 * SNAPSHOT_EVERY
    bench.fill(last, snapshot=last)
    bench.home.put(snapshot_key(last), b"junk")
    assert bench.mirror().error is None
    assert bench.far.list("commit/") == bench.home.list("commit/")


@pytest.mark.parametrize("spoiled", ["commit", "snapshot"])
def test_a_place_that_is_not_homes_stops_the_region(spoiled: str) -> None:
    bench = MirrorBench()
    last = 10 * SNAPSHOT_EVERY
    bench.fill(last, snapshot=last)
    if spoiled == "commit":
        state = bench.states[last]
        other = encode(commit(state, "refuse", reason="something else"))
        bench.far.put(commit_key(last), other)
    else:
        bench.far.put(snapshot_key(last), bench.snapshots[snapshot_key(last)].replace(b'"nothing"', b'"something"'))
    actor = bench.mirror()
    assert isinstance(actor.error, RegionStoppedError) and f"{spoiled}/" in str(actor.error)


@pytest.mark.parametrize("lost", [(128,), (129,), (129, 130), (128, 129, 130)], ids=str)
@pytest.mark.parametrize("junk", [None, b"junk"])
def test_what_home_has_lost_and_the_region_has_holds_no_mirror_up_and_goes_back(
    lost: tuple[int, ...], junk: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A syncer that has begun behind it holds none of it."""
    monkeypatch.setitem(globals(), "RUN", replace(RUN, keyring=NotJunk(), kept={}))
    bench = MirrorBench()
    bench.fill(last=130, snapshot=128)
    RUN.kept.clear()
    for n in lost:
        bench.home.put(commit_key(n), junk) if junk else bench.home.delete(commit_key(n))
    assert bench.mirror().error is None
    assert bench.far.get(commit_key(LENGTH - 1)) == bench.home.get(commit_key(LENGTH - 1))
    assert RUN.kept == {commit_key(n): bench.far.get(commit_key(n)) for n in lost}


def test_a_copy_in_a_region_that_is_not_homes_own_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RUN", replace(RUN, kept={}))
    bench = MirrorBench()
    bench.fill(last=130, snapshot=128)
    RUN.kept.clear()
    bench.home.delete(commit_key(130))
    bench.far.put(commit_key(130), encode(commit(bench.states[130], "refuse", reason="something else")))
    assert isinstance(bench.mirror().error, RecordError)
    assert RUN.kept == {}


def test_a_copy_is_held_while_home_lacks_the_commit_and_only_if_it_is_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RUN", replace(RUN, keyring=NotJunk(), kept={}))
    bench, key = MirrorBench(), commit_key(130)
    mirror, record = Mirror(RUN, lambda: bench.states[-1], lambda: True), bench.home.get(key) or b""
    for there, copy, held in ((None, b"junk", {}), (None, record, {key: record}), (record, record, {})):
        bench.home.put(key, there) if there else bench.home.delete(key)
        actor = bench.world.start("mirror", mirror._of_home(key, copy))
        assert bench.world.run(lambda actor=actor: actor.ended, 10.0) and actor.result == copy
        assert mirror._lost == held
