"""Whoever dies, wherever: the bucket alone is enough to go on, and nothing is merged twice or lost silently."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.store.port import Store
from diloco_cli.virtual.world import Actor, Fault, World
from tests.simulation.sweeps import check, finished, histories, points_around_writes
from tests.simulation.toy import ToyFleet, make_run

RUN = make_run(merges=6)


def log_bytes(fleet: ToyFleet) -> list[bytes | None]:
    return [fleet.world.store.get(key) for key in fleet.world.store.list("commit/")]


def finishes_soundly(fleet: ToyFleet, run: RunFormat = RUN) -> None:
    found = finished(fleet)
    assert found.kinds.count("finish") == 1 and found.tokens >= run.settings.train.tokens


def test_a_history_without_faults_is_sound() -> None:
    fleet = ToyFleet(RUN).start()
    finishes_soundly(fleet)
    assert check(fleet).kinds.count("merge") > 6


def test_the_syncer_may_die_around_every_write() -> None:
    points = points_around_writes(RUN, "syncer")
    restarts = 0
    for _, fleet in histories(RUN, Fault.CRASH, points):
        finishes_soundly(fleet)
        restarts += len([a for a in fleet.world.actors if a.name == "syncer"]) - 1
    assert restarts == len(points) > 30


@pytest.mark.long
def test_the_syncer_may_die_before_every_operation() -> None:
    last = max(number for _, number in points_around_writes(RUN, "syncer"))
    for _, fleet in histories(RUN, Fault.CRASH, [("syncer", number) for number in range(last)]):
        finishes_soundly(fleet)


def test_a_learner_may_die_around_every_write() -> None:
    restarts = 0
    for _, fleet in histories(RUN, Fault.CRASH, points_around_writes(RUN, "l0")):
        finishes_soundly(fleet)
        restarts += len([a for a in fleet.world.actors if a.name == "l0"]) - 1
    assert restarts > 15


@pytest.mark.parametrize("actor", ["syncer", "l0"])
@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.TWICE])
def test_answers_may_be_lost_and_calls_repeated(actor: str, fault: Fault) -> None:
    for _, fleet in histories(RUN, fault, points_around_writes(RUN, actor)[1::5]):
        finishes_soundly(fleet)


def test_everybody_may_die_at_once() -> None:
    fleet = ToyFleet(RUN).start().until_commits(5)
    fleet.kill_all()
    before = log_bytes(fleet)
    fleet.start()
    finishes_soundly(fleet)
    assert log_bytes(fleet)[: len(before)] == before
    assert check(fleet).kinds.count("epoch_start") == 2


def read(store: Store) -> Actor:
    world = World(store)
    reader = world.start("reader", read_log(RUN))
    assert world.run(lambda: reader.ended, 10)
    return reader


@pytest.fixture
def bucket() -> Store:
    fleet = ToyFleet(RUN).start()
    fleet.finish()
    return fleet.world.store


def test_reading_the_log_twice_gives_the_same_state_and_so_does_a_snapshot(bucket: Store) -> None:
    assert bucket.get("hint/head.json") is not None
    with_snapshot = read(bucket)
    bucket.delete("hint/head.json")
    from_zero = read(bucket)
    assert with_snapshot.operations < from_zero.operations, "the snapshot was used"
    assert with_snapshot.result == from_zero.result


@pytest.mark.parametrize("hint", [b"", b"{", b"[]", b'{"snapshot":99}', b'{"snapshot":0}', b'{"snapshot":-1}'])
def test_a_damaged_hint_costs_time_only(bucket: Store, hint: bytes) -> None:
    good = read(bucket).result
    bucket.put("hint/head.json", hint)
    assert read(bucket).result == good


def test_a_damaged_snapshot_costs_time_only(bucket: Store) -> None:
    good = read(bucket).result
    (key,) = bucket.list("snapshot/")
    data = bucket.get(key) or b""
    for damaged in (data[:-1], b"{}", data.replace(b'"run_id":"id"', b'"run_id":"no"')):
        bucket.put(key, damaged)
        assert read(bucket).result == good


@pytest.mark.parametrize("mutant", ["chain", "twice", "tokens", "state"])
def test_the_check_notices_planted_mistakes(mutant: str) -> None:
    """An independent replayer that cannot fail proves nothing."""
    fleet = ToyFleet(RUN).start()
    fleet.finish()
    store, last = fleet.world.store, fleet.num_commits() - 1
    merge_key = f"commit/{last - 1:012d}.json"
    data = store.get(merge_key) or b""
    match mutant:
        case "chain":
            store.put(merge_key, data.replace(b'"software":"test"', b'"software":"best"'))
        case "twice":
            store.put(f"commit/{last:012d}.json", data)
        case "tokens":
            store.put(merge_key, data.replace(b'"tokens":', b'"tokens":1', 1))
        case "state":
            (key,) = [k for k in store.list("state/") if f"/{last - 1:012d}-" in k]
            store.put(key, b"state:1:1")
    with pytest.raises(AssertionError):
        check(fleet)
