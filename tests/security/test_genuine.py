"""What is not genuine changes nothing: forged claims and offers in the name of a living learner. In virtual time."""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.protocol.actors.inbox import RETIRE_S
from diloco_cli.protocol.log.claims import STRANGERS_PASSED
from diloco_cli.protocol.log.keys import fingerprint, incarnation_key, incarnation_of, number_of, offer_key, request_key
from diloco_cli.protocol.log.records import ProcessClaim, Request, encode
from diloco_cli.signing import learner_signer
from tests.faulty_world import FaultyWorld
from tests.security.signed import SignedFleet, as_learner, signed_run
from tests.simulation.operated import asked, state_of
from tests.simulation.toy import LearnerProfile, ToyFleet, make_run
from tests.unit.protocol.records import genesis
from tests.unit.protocol.records import offer as make_offer

CALL_S = 0.04
COSTS_S = 10.0
SLOW_STEP_S = 1.0


def far_away() -> FaultyWorld:
    return FaultyWorld(latency_s=lambda actor, operation: CALL_S)


def claimed(fleet: ToyFleet, name: str, number: int, signer: str | None = None) -> None:
    """A claim by a process of `signer` (the learner itself), which is dead by now; its certificate is there."""
    keyring = as_learner(fleet.run, signer or name).keyring
    incarnation = incarnation_of(number, fingerprint(keyring.public(learner_signer(signer or name))))
    key = incarnation_key(name, incarnation)
    claim = ProcessClaim(incarnation, f"{number:032x}", "host", 1, "then", "test")
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
        assert number_of(state_of(fleet).learner("l0").floor) == dead + 1
    print(f"first merge after {took_s[0]:.1f} s, and with 1,000 dead incarnations after {took_s[1]:.1f} s")
    assert took_s[1] - took_s[0] <= COSTS_S


def test_a_forged_successor_neither_raises_a_floor_nor_retires_a_mailbox_nor_ends_its_victim() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=10_000)))
    fleet.profile = {name: LearnerProfile(SLOW_STEP_S) for name in ("l0", "l1")}  # merges cost time here
    fleet.start().until_commits(5)
    own = as_learner(fleet.run, "l0").keyring.public(learner_signer("l0"))
    first, second = (incarnation_of(number, fingerprint(own)) for number in (1, 2))
    fleet.world.store.create(incarnation_key("l0", second), encode(ProcessClaim(2, "n", "host", 1, "then", "test")))
    claimed(fleet, "l0", 3, "l1")
    forged = replace(make_offer(genesis()), learner="l0", incarnation=second, seq=0)
    key, other = offer_key(*forged.id), as_learner(fleet.run, "l1").keyring
    fleet.world.store.create(key, other.sign(learner_signer("l1"), key, encode(forged)))
    fleet.world.run_for(RETIRE_S + 10.0)
    known, before = state_of(fleet).learner("l0"), merged_of(fleet, "l0")
    assert (known.floor, known.bad_in_a_row, known.refused) == (first, 0, 0)
    fleet.world.run_for(10 * SLOW_STEP_S)
    assert merged_of(fleet, "l0") > before and fleet.errors() == [] and len(fleet.living("l0")) == 1


def test_forged_requests_of_operators_are_stepped_over_and_the_log_hears_nothing_of_them() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=10_000)), far_away()).start().until_commits(8)
    for number in range(STRANGERS_PASSED - 1):
        key = request_key(number)
        data = encode(Request(number, "stop", "n", "then"))
        signed = as_learner(fleet.run, "l1").keyring.sign(learner_signer("l1"), key, data) if number == 0 else data
        fleet.world.store.create(key, signed)
    fleet.world.run_for(20.0)
    assert state_of(fleet).phase == "RUNNING" and "refuse" not in fleet.kinds()
    asked_s = fleet.world.now_s
    assert asked(fleet, "stop").result == STRANGERS_PASSED - 1
    assert fleet.world.run(lambda: state_of(fleet).phase == "STOPPED", 60.0)
    assert fleet.world.now_s - asked_s <= 5.0


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
