"""Garbage goes, little by little, behind a committed floor; everything that anybody needs stays."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.actors import collection
from diloco_cli.protocol.actors.collection import KEPT_BATCHES, KEPT_MOMENTS, KEPT_SNAPSHOTS, LEAST_ROUNDS
from diloco_cli.protocol.log.commit_log import read_log, state_after
from diloco_cli.protocol.log.keys import event_key, snapshot_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.virtual.world import Actor, Fault, World
from tests.simulation.operated import (
    answered,
    asked,
    command,
    done,
    frequent_snapshots,
    note_texts,
    request,
    run_that_keeps,
    saving,
    started,
    state_of,
    where_the_command_dies,
)
from tests.simulation.sweeps import check, finished
from tests.simulation.toy import ToyFleet

__all__ = ["frequent_snapshots"]
pytestmark = pytest.mark.usefixtures("frequent_snapshots")
RUN = run_that_keeps(merges=26)
IN_TURN = run_that_keeps(4, merges=40)
DELETABLE = ("delta/", "offer/", "weights/", "state/", "inner/", "snapshot/", "event/")


def keys(fleet: ToyFleet) -> set[str]:
    return set(fleet.world.store.list("", limit=100_000))


def collected_by_request(world: World | None = None) -> ToyFleet:
    fleet = started(RUN, 16, world)
    request(fleet, "gc")
    return fleet


def test_by_request_two_rounds_stay_and_what_only_older_commits_need_goes() -> None:
    fleet = started(RUN, 16)
    before = keys(fleet)
    state = answered(fleet, "gc")
    (floor,) = [record for record in fleet.records() if record["kind"] == "gc_floor"]
    assert floor["floor"] == state.gc_floor == floor["n"] - 1 - LEAST_ROUNDS * RUN.num_fragments
    finished(fleet)
    gone = before - keys(fleet)
    assert {key.partition("/")[0] for key in gone} >= {"delta", "offer", "weights", "state"}
    assert all(key.startswith(DELETABLE) for key in gone)


@pytest.mark.parametrize("junk", [b"junk", b"{}"])
def test_what_somebody_puts_in_the_place_of_a_snapshot_displaces_none_that_a_reader_needs(junk: bytes) -> None:
    fleet = started(RUN, 22)
    genuine = {int(key[9:21]) for key in keys(fleet) if key.startswith("snapshot/")}
    for n in set(range(22)) - genuine:
        fleet.world.store.create(snapshot_key(n), junk)
    floor = answered(fleet, "gc").gc_floor
    finished(fleet)
    genuine |= {int(key[9:21]) for key in keys(fleet) if key.startswith("snapshot/") and int(key[9:21]) >= 22}
    kept = sorted(n for n in genuine if n <= floor)[-KEPT_SNAPSHOTS:]
    left = {int(key[9:21]) for key in keys(fleet) if key.startswith("snapshot/")}
    assert len(kept) == KEPT_SNAPSHOTS and min(left) == kept[0] and left >= set(kept)


def test_commits_epochs_incarnations_and_requests_are_never_deleted() -> None:
    fleet = collected_by_request()
    fleet.world.faults[("syncer", fleet.living("syncer")[0].operations + 40)] = Fault.CRASH
    finished(fleet)
    deleted = {key for _, _, key in fleet.world.writes if key not in keys(fleet)}
    assert deleted and all(key.startswith(DELETABLE) for key in deleted)


def test_in_turn_the_bucket_stops_growing() -> None:
    """With everything kept it holds several objects for each merge, without end."""
    sizes = []
    for run in (IN_TURN, run_that_keeps(merges=40)):
        fleet = ToyFleet(run).start()
        finished(fleet)
        sizes.append(len([key for key in keys(fleet) if key.startswith(DELETABLE)]))
        assert ("gc_floor" in fleet.kinds()) == (run is IN_TURN)
    with_collection, without = sizes
    assert with_collection < without / 2


def test_a_rolled_back_run_is_replayed_from_a_floor_beyond_its_rollback() -> None:
    fleet = started(RUN, 8)
    answered(fleet, "rollback", to=4)
    fleet.until_commits(26, 30)
    state = answered(fleet, "gc")
    assert state.gc_floor > state.base_floor > 0
    finished(fleet)


def test_what_lies_behind_the_floor_cannot_be_gone_back_to_and_what_lies_on_it_can() -> None:
    fleet = started(run_that_keeps(merges=60), 16)
    floor = answered(fleet, "gc").gc_floor
    state = answered(fleet, "rollback", to=floor - 1)
    assert any(text.startswith(f"no rollback: only commits {floor} to ") for text in note_texts(state))
    assert answered(fleet, "rollback", to=floor).rolled_back_to == floor
    finished(fleet)


def test_readers_have_their_grace() -> None:
    run = run_that_keeps(grace_s=0.6, merges=26)
    fleet = started(run, 16)
    before = keys(fleet)
    answered(fleet, "gc")
    fleet.world.run_for(0.4)
    assert before <= keys(fleet), "nothing is deleted yet"
    fleet.world.run_for(0.6)
    assert not before <= keys(fleet)


def test_merging_goes_on_at_its_pace_while_garbage_is_collected() -> None:
    """A store whose deletions take long: a merge waits for one of them at most."""
    paces = []
    for wanted in (False, True):
        world = World(latency_s=lambda actor, op: 0.05 if type(op).__name__ == "Delete" else 0.001)
        fleet = started(run_that_keeps(merges=60), 16, world)
        if wanted:
            answered(fleet, "gc")
        n, now_s = state_of(fleet).merges, world.now_s
        world.run_for(1.5)
        paces.append((state_of(fleet).merges - n) / (world.now_s - now_s))
    assert paces[1] > 0.8 * paces[0]


def sweep_operations() -> range:
    """The syncer's operations from the request until nothing is left to delete."""
    fleet = collected_by_request()
    (syncer,) = fleet.living("syncer")
    first = syncer.operations
    assert fleet.world.run(lambda: fleet.served.housekeeper.collector.is_done(state_of(fleet)) and
                           state_of(fleet).gc_floor > 0, 30)  # fmt: skip
    return range(first, syncer.operations + 1)


def test_the_syncer_may_die_at_every_deletion_and_the_next_one_goes_on() -> None:
    points = sweep_operations()
    assert len(points) > 60
    for point in points[::11]:
        fleet = collected_by_request(World(faults={("syncer", point): Fault.CRASH}))
        finished(fleet)
        assert "gc_floor" in check(fleet).kinds


@pytest.mark.parametrize("fault", [Fault.LOST_ANSWER, Fault.TWICE])
def test_answers_may_be_lost_and_calls_repeated(fault: Fault) -> None:
    for point in sweep_operations()[3::29]:
        finished(collected_by_request(World(faults={("syncer", point): fault})))


def test_a_reader_that_comes_late_starts_over_with_what_there_is() -> None:
    """A learner joins with the log of before, and finds its weights gone."""
    fleet = started(RUN, 8)
    late = fleet.learner("l0")
    assert fleet.world.run(lambda: str(late.pending).startswith("Get(key='weights/"), 30)
    late.paused = True
    fleet.until_commits(22, 30)
    answered(fleet, "gc")
    fleet.world.run_for(1.0)
    fleet.world.resume(late)
    fleet.finish()
    assert late.error is None or "taken the place" in str(late.error)


def collected_behind(fleet: ToyFleet, zombie: Actor) -> None:
    """A successor goes on, and what the zombie knows of is collected before it wakes up."""
    fleet.world.pause(zombie)
    fleet.syncer("successor")
    fleet.until_commits(26, 30)
    answered(fleet, "gc")
    fleet.world.run_for(1.0)
    fleet.world.resume(zombie)
    assert fleet.ended_within(zombie, 10) and type(zombie.error).__name__ == "FencedError", zombie.error


def test_a_zombie_syncer_whose_states_were_collected_is_fenced() -> None:
    fleet = started(RUN, 6)
    collected_behind(fleet, *fleet.living("syncer"))
    fleet.finish()
    assert check(fleet).kinds[-1] == "finish"


def test_a_zombie_that_had_just_taken_over_finds_its_states_collected_and_is_fenced() -> None:
    """It has nothing in memory yet, and what it looks for is gone: that is no damage."""
    fleet = started(RUN, 6)
    fleet.restart = False
    epoch = state_of(fleet).epoch
    zombie = fleet.syncer("zombie")
    assert fleet.world.run(lambda: state_of(fleet).epoch > epoch, 10)
    collected_behind(fleet, zombie)


@pytest.mark.parametrize("kind", ["state", "weights"])
def test_a_zombie_that_cannot_read_back_what_it_wrote_is_fenced(kind: str) -> None:
    """Its version was never committed, and was collected before it looked at it again."""
    fleet = started(RUN, 6)
    (zombie,) = fleet.living("syncer")
    assert fleet.world.run(lambda: str(zombie.pending).startswith(f"Get(key='{kind}/") and zombie_wrote(fleet), 10)
    collected_behind(fleet, zombie)


def zombie_wrote(fleet: ToyFleet) -> bool:
    """Versions that no commit names lie in the bucket."""
    written = {key.split("/")[2] for key in fleet.world.store.list("state/")}
    named = [output for record in fleet.records() for output in record.get("outputs", [])]
    return bool(written - {f"{o['version']:012d}-{o['epoch']:010d}-{o['state_digest']}" for o in named})


def test_orphans_of_an_older_epoch_behind_the_floor_go_and_younger_ones_stay() -> None:
    fleet = started(RUN, 16)
    made = {name: f"state/0000/{version:012d}-{epoch:010d}-blake3-{name}"
            for name, version, epoch in (("old", 3, 0), ("now", 3, 9), ("late", 9999, 0))}  # fmt: skip
    for key in made.values():
        fleet.world.store.create(key, b"orphan")
    answered(fleet, "gc")
    finished(fleet)
    assert {name for name, key in made.items() if key in keys(fleet)} == {"late"} | (
        {"now"} if state_of(fleet).outputs[0].version < 3 else set()
    )


def test_each_learners_newest_moments_stay() -> None:
    fleet = ToyFleet(saving(RUN)).start()
    fleet.until_commits(22, 30)
    before = {name: fleet.world.store.list(f"inner/{name}/") for name in ("l0", "l1")}
    answered(fleet, "gc")
    fleet.world.run_for(1.0)
    for name, saved in before.items():
        left = fleet.world.store.list(f"inner/{name}/")
        assert len(saved) > KEPT_MOMENTS and saved[0] not in left
        assert left == sorted(left) and len(left) >= KEPT_MOMENTS and left[-1] >= saved[-1]


def test_each_units_newest_events_stay() -> None:
    fleet = started(RUN, 16)
    for unit, count in (("l0", KEPT_BATCHES + 300), ("l1", 3)):
        for ms in range(count):
            fleet.world.store.create(event_key(unit, ms, "aa"), b"{}\n")
    answered(fleet, "gc")
    finished(fleet)
    left = [sorted(key for key in keys(fleet) if key.startswith(f"event/{unit}/")) for unit in ("l0", "l1")]
    assert left[0] == sorted(event_key("l0", ms, "aa") for ms in range(300, KEPT_BATCHES + 300))
    assert len(left[1]) == 3


def test_with_nothing_to_collect_the_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "FLOORS_APART", 30)
    fleet = started(RUN, 3)
    state = answered(fleet, "gc")
    assert any(text.startswith("nothing to collect") for text in note_texts(state)) and state.gc_floor == 0


def test_with_no_syncer_alive_the_command_collects_and_may_die_at_every_operation() -> None:
    fleets = list(where_the_command_dies(lambda world: started(RUN, 16, world), 13, "gc"))
    for fleet in fleets:
        finished(fleet)
    assert len(fleets) > 4


def test_a_stopped_run_is_stopped_again_before_the_command_deletes_anything() -> None:
    """Deletions take long, and whoever interrupts them must not leave a run behind that looks as if it were served."""
    fleet = started(RUN, 16)
    answered(fleet, "stop")
    fleet.finish()
    asked(fleet, "gc")
    actor = command(fleet)
    assert fleet.world.run(lambda: str(actor.pending).startswith("Delete"), 30)
    fleet.world.kill(actor)
    state = state_of(fleet)
    assert state.phase == "STOPPED" and state.gc_floor > 0


def test_whoever_serves_is_heard_while_the_past_is_read() -> None:
    """A silent syncer would be taken for dead: on a slow store that walk takes a while."""
    fleet = started(RUN, 16)
    heartbeats: list[None] = []

    def pulse() -> Steps[None]:
        heartbeats.append(None)
        yield from ()

    walk = fleet.world.start("reader", state_after(RUN, 14, (), pulse))
    assert done(fleet, walk).result.n == 14 and len(heartbeats) == 1, "four commits at a time, from that of commit 10"


def test_the_past_is_read_from_the_newest_snapshot_before_it_or_from_the_beginning() -> None:
    fleet = started(RUN, 16)
    fleet.finish()

    def walked(n: int) -> Actor:
        return done(fleet, fleet.world.start("reader", state_after(RUN, n, ())))

    from_snapshot = walked(12)
    whole = done(fleet, fleet.world.start("reader", read_log(RUN))).result
    assert walked(whole.n).result == whole
    for key in fleet.world.store.list("snapshot/"):
        fleet.world.store.put(key, b"damaged")
    from_zero = walked(12)
    assert from_snapshot.result == from_zero.result
    assert from_snapshot.operations < from_zero.operations
