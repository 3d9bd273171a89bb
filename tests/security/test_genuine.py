"""What is not genuine changes nothing: forged claims and offers in the name of a learner that works, junk under its
coming keys, and floods of both. All in virtual time, at 40 ms a call."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from diloco_cli.protocol.actors.inbox import RETIRE_S
from diloco_cli.protocol.log.keys import incarnation_key, offer_key, placed_key
from diloco_cli.protocol.log.places import MAX_PLACES
from diloco_cli.protocol.log.records import ProcessClaim
from diloco_cli.protocol.log.wire import encode
from diloco_cli.signing import learner_signer
from diloco_cli.virtual.world import World
from tests.security.signed import SignedFleet, as_learner, signed_run
from tests.simulation.operated import state_of
from tests.simulation.toy import LearnerProfile, ToyFleet, make_run
from tests.unit.protocol.records import genesis, with_steps
from tests.unit.protocol.records import offer as make_offer

CALL_S = 0.04
COSTS_S = 10.0
FLOOD = 20_000
JUNK = b'{"nonce":"of nobody"}'


def far_away() -> World:
    return World(latency_s=lambda actor, operation: CALL_S)


def claimed(fleet: ToyFleet, name: str, number: int, signer: str | None = None) -> None:
    """A claim by a process of `signer` (the learner itself), which is dead by now."""
    keyring, key = as_learner(fleet.run, signer or name).keyring, incarnation_key(name, number)
    claim = ProcessClaim(number, f"{number:032x}", "host", 1, "then", "test")
    fleet.world.store.create(key, keyring.sign(learner_signer(signer or name), key, encode(claim)))


def merged_of(fleet: ToyFleet, name: str) -> int:
    return state_of(fleet).learner(name).merges


def first_merge_s(fleet: ToyFleet, name: str) -> float:
    since_s = fleet.world.now_s
    mine = lambda: any(i["learner"] == name for record in fleet.records()[-2:] for i in record.get("inputs", ()))  # noqa: E731
    assert fleet.world.run(mine, 60.0), f"{name} is not merged"
    return fleet.world.now_s - since_s


def test_a_thousand_dead_incarnations_cost_less_than_ten_seconds() -> None:
    """The learner's start and the syncer's look for it, against a learner with none."""
    took_s = []
    for dead in (0, 1000):
        fleet = SignedFleet(signed_run(make_run(merges=1000)), far_away())
        for number in range(1, dead + 1):
            claimed(fleet, "l0", number)
        fleet.syncer()
        fleet.learner("l1")
        fleet.until_commits(5)
        fleet.learner("l0")
        took_s.append(first_merge_s(fleet, "l0"))
        assert state_of(fleet).learner("l0").floor == dead + 1
    print(f"first merge after {took_s[0]:.1f} s, and with 1,000 dead incarnations after {took_s[1]:.1f} s")
    assert took_s[1] - took_s[0] <= COSTS_S


def test_a_forged_successor_neither_raises_a_floor_nor_retires_a_mailbox_nor_ends_its_victim() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=10_000))).start().until_commits(5)
    fleet.world.store.create(incarnation_key("l0", 2), encode(ProcessClaim(2, "n", "host", 1, "then", "test")))
    claimed(fleet, "l0", 3, "l1")
    forged = replace(make_offer(genesis()), learner="l0", incarnation=2, seq=0)
    key, other = offer_key(*forged.id), as_learner(fleet.run, "l1").keyring
    fleet.world.store.create(key, other.sign(learner_signer("l1"), key, encode(forged)))
    fleet.world.run_for(RETIRE_S + 10.0)
    known, before = state_of(fleet).learner("l0"), merged_of(fleet, "l0")
    assert (known.floor, known.faults, known.refused) == (1, 0, 0)
    fleet.world.run_for(5.0)
    assert merged_of(fleet, "l0") > before and fleet.errors() == [] and len(fleet.living("l0")) == 1


@pytest.mark.parametrize("others", [1, MAX_PLACES - 1], ids=["one object", "all places but the last"])
def test_a_learner_steps_over_junk_under_its_coming_keys(others: int) -> None:
    """Its offers keep their numbers, it is not fenced, and its next process claims the next incarnation."""
    fleet = SignedFleet(signed_run(make_run(merges=400))).start().until_commits(5)
    store, seq = fleet.world.store, max(known[2] for known in fleet.published.offers if known[0] == "l0")
    coming = [offer_key("l0", 1, seq + 3), offer_key("l0", 1, seq + 6), incarnation_key("l0", 2)]
    for key in (placed_key(key, place) for key in coming for place in range(others)):
        store.create(key, JUNK)
    fleet.until_commits(60)
    assert ("l0", 1, seq + 6) in fleet.published.offers and len(fleet.living("l0")) == 1
    fleet.kill("l0")
    fleet.finish(300)
    assert fleet.errors() == [] and state_of(fleet).learner("l0").floor == 2
    assert store.get(placed_key(incarnation_key("l0", 2), others)) is not None
    reasons = {outcome["reason"] for record in fleet.records() for outcome in record["outcomes"]}
    assert "bad_signature" not in reasons


def test_a_learner_whose_keys_are_all_occupied_says_which_and_what_to_do() -> None:
    fleet = SignedFleet(signed_run())
    for place in range(MAX_PLACES):
        fleet.world.store.create(placed_key(incarnation_key("l0", 1), place), JUNK)
    fleet.start().until_commits(3)
    (error,) = fleet.errors()
    assert "incarnation/l0/00000001.json" in str(error) and "bucket-policy" in str(getattr(error, "hint", ""))


def test_a_flood_in_one_learners_name_slows_nobody() -> None:
    """20,000 claims, 20,000 offers, and objects at all places of its next ones: slots go on at their pace."""
    merges, run = [], signed_run(with_steps(make_run(learners=3, merges=10_000), 1.0))
    for flooded in (False, True):
        fleet = SignedFleet(run, far_away())
        fleet.profile = {island.name: LearnerProfile(1.0) for island in run.islands}
        fleet.start().until_commits(10)
        seq = max(known[2] for known in fleet.published.offers if known[0] == "l0")
        for number in range(FLOOD if flooded else 0):
            fleet.world.store.create(incarnation_key("l0", 2 + number), JUNK)
            fleet.world.store.create(offer_key("l0", 1, seq + 1 + number), JUNK)
        for place in range(MAX_PLACES if flooded else 0):
            fleet.world.store.create(placed_key(incarnation_key("l0", 2), place), JUNK)
        before = Counter({name: known.merges for name, known in state_of(fleet).learners.items()})
        fleet.world.run_for(200.0)
        after = Counter({name: known.merges for name, known in state_of(fleet).learners.items()})
        merges.append({name: after[name] - before[name] for name in sorted(after)})
        assert fleet.errors() == []
    print(f"merges in 200 s: {merges[0]}, and under the flood {merges[1]}")
    assert min(merges[1].values()) >= 0.93 * min(merges[0].values()), "the flooded learner uploads a little longer"


def test_an_offer_that_is_damaged_at_rest_holds_up_none_after_it() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=60))).start().until_commits(8)
    fleet.restart = False
    fleet.kill("syncer")
    fleet.world.run_for(1.0)
    newest = max((known for known in fleet.published.offers if known[0] == "l0"), key=lambda known: known[2])
    key = offer_key(*newest)
    data = fleet.world.store.get(key) or b""
    fleet.world.store.put(key, data.replace(b'"tokens":', b'"token_":'))
    fleet.syncer()
    fleet.finish(120)
    outcomes = [outcome for record in fleet.records() for outcome in record["outcomes"]]
    (mine,) = [outcome for outcome in outcomes if outcome["reason"] == "bad_signature"]
    assert (mine["learner"], mine["incarnation"], mine["seq"]) == newest
    assert state_of(fleet).phase == "FINISHED" and state_of(fleet).learner("l0").next_seq > newest[2] + 5
