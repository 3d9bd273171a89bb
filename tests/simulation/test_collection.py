"""Garbage goes, little by little, behind a committed floor; everything that anybody needs stays."""

from __future__ import annotations

import pytest

from diloco_cli.protocol.actors import collection
from diloco_cli.protocol.actors.collection import KEPT_SNAPSHOTS, LEAST_ROUNDS
from diloco_cli.protocol.log.commit_log import state_after
from diloco_cli.protocol.log.keys import snapshot_key
from diloco_cli.protocol.log.operations import Steps
from tests.simulation.operated import (
    answered,
    done,
    frequent_snapshots,
    note_texts,
    run_that_keeps,
    started,
    where_the_command_dies,
)
from tests.simulation.sweeps import finished
from tests.simulation.toy import ToyFleet

__all__ = ["frequent_snapshots"]
pytestmark = pytest.mark.usefixtures("frequent_snapshots")
RUN = run_that_keeps(merges=26)
IN_TURN = run_that_keeps(4, merges=40)
DELETABLE = ("delta/", "offer/", "weights/", "state/", "inner/", "snapshot/", "event/")


def keys(fleet: ToyFleet) -> set[str]:
    return set(fleet.world.store.list("", limit=100_000))


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


def test_what_lies_behind_the_floor_cannot_be_gone_back_to_and_what_lies_on_it_can() -> None:
    fleet = started(run_that_keeps(merges=60), 16)
    floor = answered(fleet, "gc").gc_floor
    state = answered(fleet, "rollback", to=floor - 1)
    assert any(text.startswith(f"no rollback: only commits {floor} to ") for text in note_texts(state))
    assert answered(fleet, "rollback", to=floor).rolled_back_to == floor
    finished(fleet)


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


def test_whoever_serves_is_heard_while_the_past_is_read() -> None:
    """A silent syncer would be taken for dead: on a slow store that walk takes a while."""
    fleet = started(RUN, 16)
    heartbeats: list[None] = []

    def pulse() -> Steps[None]:
        heartbeats.append(None)
        yield from ()

    walk = fleet.world.start("reader", state_after(RUN, 14, (), pulse))
    assert done(fleet, walk).result.n == 14 and len(heartbeats) == 1, "four commits at a time, from that of commit 10"
