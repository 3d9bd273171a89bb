"""Weights whose bytes are damaged for good: nobody waits for them for ever, and the syncer makes them anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_cli.protocol.actors import syncer as repair
from diloco_cli.protocol.log.commit_log import Pulse
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from tests.simulation.operated import (
    answered,
    frequent_snapshots,
    run_that_keeps,
    started,
    state_of,
)
from tests.simulation.sweeps import check
from tests.simulation.toy import ToyFleet
from tests.studies.verifying import verified_integers

__all__ = ["frequent_snapshots"]
RUN = run_that_keeps(merges=14, skip_after_s=0.5)
TO = 4


def spoil(fleet: ToyFleet, fragment: int, data: bytes | None = b"other bytes") -> tuple[str, bytes]:
    """Its newest weights, for good. Returns what was there, for the reader who demands that everything is."""
    store, output = fleet.world.store, state_of(fleet).outputs[fragment]
    (key,) = store.list(f"weights/{fragment:04d}/{output.version:012d}-")
    whole = store.get(key) or b""
    store.delete(key) if data is None else store.put(key, data)
    return key, whole


def texts(fleet: ToyFleet) -> list[str]:
    return [record["reason"] for record in fleet.records()]


def is_over_and_sound(fleet: ToyFleet, *spoilt: tuple[str, bytes]) -> None:
    fleet.finish(120)
    assert fleet.errors() == []
    assert all(fleet.world.store.get(key) != whole for key, whole in spoilt), "nothing is overwritten"
    for key, whole in spoilt:
        fleet.world.store.put(key, whole)
    assert check(fleet).kinds[-1] == "finish"
    assert verified_integers(fleet.world.store, fleet.run).ok, "a verifier's own books say otherwise"


def silence(fleet: ToyFleet) -> None:
    """Nobody is left, and nobody comes."""
    fleet.restart = False
    fleet.kill("syncer", "l0", "l1")


def silent(run: RunFormat, commits: int = 8) -> ToyFleet:
    fleet = started(run, commits)
    silence(fleet)
    return fleet


def rolled_back_and_spoilt(
    run: RunFormat, fragments: tuple[int, ...], data: bytes | None
) -> tuple[ToyFleet, list[tuple[str, bytes]]]:
    """No learner sees when the rollback is made, so none has its weights."""
    fleet = started(run, 8)
    fleet.restart = False
    learners = [*fleet.living("l0"), *fleet.living("l1")]
    for learner in learners:
        fleet.pause(learner)
    answered(fleet, "rollback", to=TO)
    spoilt = [spoil(fleet, fragment, data) for fragment in fragments]
    for learner in learners:
        fleet.resume(learner)
    return fleet, spoilt


@pytest.mark.parametrize("data", [b"other bytes", None], ids=["damaged", "gone"])
@pytest.mark.parametrize("fragments", [(0,), (0, 1)])
def test_after_a_rollback_a_version_that_cannot_be_had_is_made_anew(
    fragments: tuple[int, ...], data: bytes | None
) -> None:
    fleet, spoilt = rolled_back_and_spoilt(run_that_keeps(merges=60, skip_after_s=0.5), fragments, data)
    is_over_and_sound(fleet, *spoilt)
    assert check(fleet).kinds.count("rollback") == 2
    assert any("of fragment 0 cannot be read: all made anew" in text for text in texts(fleet))


def test_learners_go_on_with_the_other_fragments_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "ROUNDS", 1 << 20)
    fleet, _ = rolled_back_and_spoilt(RUN, (0,), b"other bytes")
    n = fleet.num_commits()
    assert fleet.world.run(lambda: "merge" in fleet.kinds()[n:], 30), "nobody went on"
    assert fleet.world.run(lambda: fleet.kinds()[n:].count("merge") > 4, 30), "nobody kept going"
    merged = [output["fragment"] for commit in fleet.records()[n:] for output in commit.get("outputs", [])]
    assert set(merged) == {1} and "rollback" not in fleet.kinds()[n:]


def test_all_dead_and_a_damaged_version_is_no_end() -> None:
    """New incarnations start from committed versions alone: there are none to be had, until the syncer makes them."""
    fleet = silent(RUN)
    spoilt = spoil(fleet, 1)
    fleet.restart = True
    fleet.start()
    is_over_and_sound(fleet, spoilt)


@pytest.mark.long
def test_a_new_incarnation_waits_for_no_pause_that_has_grown() -> None:
    fleet = silent(RUN)
    fleet.syncer()
    fleet.world.run_for(3000)
    spoilt = spoil(fleet, 1)
    fleet.restart = True
    fleet.start_learners()
    assert fleet.world.run(lambda: "rollback" in fleet.kinds(), 5 * repair.SOONEST_S), "the learners wait for it"
    is_over_and_sound(fleet, spoilt)


def looked_at(monkeypatch: pytest.MonkeyPatch, readable: Callable[[bool], bool] = lambda found: found) -> list[int]:
    """The fragments whose weights a syncer looks at, from now on. `readable`: what it finds, instead of the truth."""
    looks: list[int] = []

    def is_readable(run: RunFormat, output: FragmentVersion, pulse: Pulse) -> Steps[bool]:
        looks.append(output.fragment)
        return readable((yield from look(run, output, pulse)))

    look = repair.is_readable
    monkeypatch.setattr(repair, "is_readable", is_readable)
    return looks


def test_weights_that_are_whole_are_not_made_anew_however_long_nobody_merges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = looked_at(monkeypatch)
    fleet = silent(RUN)
    assert looks == [], "where slots are merged nobody looks"
    syncer = fleet.syncer()
    fleet.world.run_for(100)
    assert not syncer.ended and "rollback" not in fleet.kinds()
    assert 2 * 3 <= len(looks) <= 2 * 8 and looks.count(0) == looks.count(1), "at growing intervals"


def test_what_cannot_be_read_for_a_moment_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = looked_at(monkeypatch)
    fleet = silent(RUN)
    key, whole = spoil(fleet, 1, None)
    fleet.syncer()
    assert fleet.world.run(lambda: looks.count(1) == 1, 30), "nobody looked meanwhile"
    fleet.world.run_for(repair.SOONEST_S - 1)
    assert looks.count(1) == 1, "the next look is in the same moment"
    fleet.world.store.put(key, whole)
    fleet.world.run_for(100)
    assert "rollback" not in fleet.kinds()


def test_where_nothing_can_be_read_for_long_three_repairs_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that hides weights, for example: versions without end would help nobody."""
    fleet = started(RUN, 8)
    with monkeypatch.context() as blind:
        looked_at(blind, lambda found: False)
        silence(fleet)
        fleet.syncer()
        assert fleet.world.run(lambda: sum("look into the bucket" in text for text in texts(fleet)) == 2, 1200)
        fleet.world.run_for(300)
    assert fleet.kinds().count("rollback") == repair.MAX_REPAIRS
    assert sorted(text for text in texts(fleet) if "look into the bucket" in text) == [
        f"version {state_of(fleet).base_floor} of fragment {fragment} cannot be read, though made anew 3 times "
        f"since it was merged: look into the bucket"
        for fragment in range(2)
    ], "each fragment is told of once"
    fleet.restart = True
    fleet.start_learners()
    fleet.until_commits(fleet.num_commits() + 3)
    fleet.world.run_for(0.05)
    assert [seen.repairs for seen in fleet.served.repairer._watched.values()] == [0, 0], "a merge begins anew"
    is_over_and_sound(fleet)


def test_a_state_that_is_lost_too_is_told_and_ends_nobody() -> None:
    fleet = silent(RUN)
    spoil(fleet, 0)
    (state,) = fleet.world.store.list(f"state/0001/{state_of(fleet).outputs[1].version:012d}-")
    whole = fleet.world.store.get(state) or b""
    fleet.world.store.delete(state)
    syncer = fleet.syncer()
    fleet.world.run_for(100)
    assert not syncer.ended
    (told,) = [text for text in texts(fleet) if "nor made anew" in text]
    assert "the committed state of fragment 1 is missing" in told
    assert fleet.kinds()[-1] == "refuse" and "rollback" not in fleet.kinds()
    fleet.world.store.put(state, whole)
    assert fleet.world.run(lambda: fleet.kinds()[-1] == "rollback", 1000), "nobody tried again"
