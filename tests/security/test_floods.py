"""Operators come first, and floods cost the flooder: requests under floods, in virtual time, at 40 ms a call."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings
from diloco_cli.protocol.log.claims import STRANGERS_PASSED
from diloco_cli.protocol.log.keys import join_key, request_key
from diloco_cli.protocol.log.records import Island, Join, Request, RunFormat, encode
from diloco_cli.signing import learner_signer
from tests.faulty_world import FaultyWorld
from tests.security.signed import SignedFleet, as_learner, signed_run
from tests.simulation.operated import asked, state_of, state_of_last_request
from tests.simulation.toy import BATCH_TOKENS, LearnerProfile, ToyFleet, make_run
from tests.unit.protocol.records import with_steps

CALL_S = 0.04
STEP_S = 1.0
SLOT_S = 2 * STEP_S
FLOOD, SIGNED_FLOOD = 20_000, 2_000


def slow_run(shards: int = 64) -> RunFormat:
    run = with_steps(make_run(merges=100_000), STEP_S)
    return signed_run(replace(run, settings=replace(run.settings, data=DataSettings(shards=shards))))


def serving(run: RunFormat) -> SignedFleet:
    fleet = SignedFleet(run, FaultyWorld(latency_s=lambda actor, operation: CALL_S))
    fleet.profile = {island.name: LearnerProfile(STEP_S) for island in run.islands}
    fleet.start()
    return fleet.until_commits(8)


def flood_of_joins(fleet: ToyFleet, names: int) -> None:
    """20,000 objects under the keys of requests to join, in so many names; unsigned."""
    epoch = state_of(fleet).epoch
    for number in range(FLOOD):
        name, place = f"f{number % names}", number // names
        join = Join(Island(name, "here", BATCH_TOKENS, 1, 1.0, 1.0), epoch, place, "n", "then")
        fleet.world.store.create(join_key(name, epoch, place), encode(join))


def asks(fleet: ToyFleet, name: str, epoch: int) -> None:
    """Writes a genuine request to join, as a newcomer does."""
    keyring = as_learner(fleet.run, name).keyring
    join = Join(Island(name, "here", BATCH_TOKENS, 1, 1.0, 1.0), epoch, 0, "n", "then")
    key = join_key(name, epoch, 0)
    fleet.world.store.create(key, keyring.sign(learner_signer(name), key, encode(join)))


def members(fleet: ToyFleet) -> int:
    return sum(len(record.get("islands", ())) for record in fleet.records())


def flood_of_signed_joins(fleet: ToyFleet) -> None:
    """2,000 requests of one name, each well signed, for an island that cannot be admitted."""
    epoch, keyring = state_of(fleet).epoch, as_learner(fleet.run, "f0").keyring
    for number in range(SIGNED_FLOOD):
        key = join_key("f0", epoch, number)
        join = encode(Join(Island("f0", "here", 0, 1, 1.0, 1.0), epoch, number, "n", "then"))
        fleet.world.store.create(key, keyring.sign(learner_signer("f0"), key, join))


@pytest.mark.parametrize("names", [0, FLOOD], ids=["one name, signed", "20,000 names"])
def test_an_operator_is_answered_within_two_slots_whatever_lies_in_the_join_queue(names: int) -> None:
    fleet = serving(slow_run())
    if names:
        flood_of_joins(fleet, names)
    else:
        flood_of_signed_joins(fleet)
    fleet.world.run_for(20.0)
    before, since_s = state_of(fleet).merges, fleet.world.now_s
    number = asked(fleet, "readmit", "l0").result
    asked_s = fleet.world.now_s
    assert fleet.world.run(lambda: state_of_last_request(fleet) > number, 60.0)
    took_s = fleet.world.now_s - asked_s
    fleet.world.run_for(50 * SLOT_S)
    merged_s = (fleet.world.now_s - since_s) / (state_of(fleet).merges - before)
    print(f"{names} names: answered after {took_s:.2f} s, slots of {SLOT_S:g} s; a merge every {merged_s:.2f} s")
    assert took_s <= 2 * SLOT_S and merged_s <= 1.1 * SLOT_S
    assert {"membership", "refuse"} & set(fleet.kinds()[10:]) == {"refuse"}, "only the operator's request is told"
    assert fleet.kinds().count("refuse") == 1


def test_an_island_that_asks_behind_a_flood_is_admitted_soon() -> None:
    fleet = serving(slow_run())
    flood_of_joins(fleet, FLOOD)
    fleet.world.run_for(20.0)
    epoch, asked_s = state_of(fleet).epoch, fleet.world.now_s
    asks(fleet, "honest", epoch)
    assert fleet.world.run(lambda: members(fleet) == 1, 120.0)
    print(f"{FLOOD} names: admitted after {fleet.world.now_s - asked_s:.1f} s")
    assert fleet.world.now_s - asked_s <= 10 * SLOT_S


def test_thirty_two_islands_join_within_two_slots_by_one_commit() -> None:
    fleet = serving(slow_run())
    epoch = state_of(fleet).epoch
    for number in range(32):
        asks(fleet, f"spot{number}", epoch)
    asked_s = fleet.world.now_s
    assert fleet.world.run(lambda: members(fleet) == 32, 60.0)
    print(f"32 joins: {fleet.world.now_s - asked_s:.2f} s, slots of {SLOT_S:g} s")
    assert fleet.world.now_s - asked_s <= 2 * SLOT_S and fleet.kinds().count("membership") == 1


def test_forged_requests_of_operators_are_stepped_over_and_the_log_hears_nothing_of_them() -> None:
    fleet = serving(slow_run())
    for number in range(STRANGERS_PASSED - 1):
        key = request_key(number)
        data = encode(Request(number, "stop", "n", "then"))
        keyring = as_learner(fleet.run, "l1").keyring
        signed = keyring.sign(learner_signer("l1"), key, data) if number == 0 else data
        fleet.world.store.create(key, signed)
    fleet.world.run_for(10 * SLOT_S)
    assert state_of(fleet).phase == "RUNNING" and "refuse" not in fleet.kinds()
    asked_s = fleet.world.now_s
    assert asked(fleet, "stop").result == STRANGERS_PASSED - 1
    assert fleet.world.run(lambda: state_of(fleet).phase == "STOPPED", 60.0)
    assert fleet.world.now_s - asked_s <= 2 * SLOT_S + 1.0
