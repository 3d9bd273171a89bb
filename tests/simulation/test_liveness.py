"""Once faults stop, commits go on; and nothing that lies in the bucket stops the syncer for good."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.digests import digest
from diloco_cli.histories.integers import gradient
from diloco_cli.protocol.log.keys import delta_key, offer_key
from diloco_cli.protocol.log.records import Offer
from diloco_cli.protocol.log.wire import encode
from tests.simulation.sweeps import check
from tests.simulation.toy import BATCH_TOKENS, Fleet, make_run

RUN = make_run(merges=8)
PAYLOAD = b"delta:%d" % gradient("l1", 0, 2 * BATCH_TOKENS)


def stranger(fleet: Fleet, **changes: Any) -> dict[str, Any]:
    """The first offer of l1 as its own process could have written it, then changed."""
    fragment = int(changes.get("fragment") == 1)
    base = fleet.world.store.list(f"weights/{fragment:04d}/")[0].rpartition("-blake3-")[2]
    steps = 2
    offer = Offer(
        "l1", 1, 0, 0, 0, 0, f"blake3-{base}", 0, steps * BATCH_TOKENS, steps * BATCH_TOKENS, steps,
        digest(PAYLOAD), len(PAYLOAD), "nonce",
    )  # fmt: skip
    fields = json.loads(encode(offer))
    return {**fields, **changes}


def with_offer(changes: dict[str, Any], raw: bytes | None = None) -> Fleet:
    """A run in which l1 only ever published that one offer, and l0 trains."""
    fleet = Fleet(RUN)
    fleet.syncer()
    fleet.world.run(lambda: fleet.world.store.get("commit/000000000000.json") is not None, 10)
    fields = stranger(fleet, **changes)
    fleet.world.store.create(delta_key("l1", 1, 0, digest(PAYLOAD)), PAYLOAD)
    fleet.world.store.create(offer_key("l1", 1, 0), encode(fields) if raw is None else raw)
    fleet.learner("l0")
    return fleet


def test_the_strangers_offer_is_sound_before_it_is_changed() -> None:
    fleet = with_offer({})
    fleet.finish()
    assert check(fleet).settled["l1", 1, 0] == "applied"


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"payload_digest": "blake3-0"}, "bad_record"),
        ({"payload_digest": "blake3-" + 64 * "0"}, "missing_payload"),
        ({"payload_bytes": 3}, "wrong_size"),
        ({"base": 7}, "unknown_base"),
        ({"base": -1}, "bad_record"),
        ({"base_digest": "x"}, "wrong_base"),
        ({"fragment": 99}, "bad_claim"),
        ({"fragment": -1}, "bad_record"),
        ({"slot": -2}, "bad_record"),
        ({"slot": 1}, "bad_claim"),
        ({"tokens": 1}, "bad_claim"),
        ({"steps": -2, "data_end": -8}, "bad_record"),
        ({"seq": 1}, "bad_record"),
        ({"learner": "l0"}, "bad_record"),
        ({"incarnation": 2}, "bad_record"),
        ({"steps": "2"}, "bad_record"),
        ({"timings": []}, "bad_record"),
        ({"events": [[1, 2]]}, "bad_record"),
        ({"steps": 0, "tokens": 0, "data_end": 0}, "no_weight"),
    ],
)
def test_a_wrong_offer_gets_its_outcome_and_the_run_goes_on(changes: dict[str, Any], outcome: str) -> None:
    fleet = with_offer(changes)
    fleet.finish()
    assert fleet.errors() == []
    assert check(fleet).settled["l1", 1, 0] == outcome


@pytest.mark.parametrize("raw", [b"", b"null", b"{", b"[" * 100_000, b'{"seq":NaN}', b"\xff\xfe", b'{"seq":1,"seq":1}'])
def test_a_torn_offer_gets_its_outcome_and_the_run_goes_on(raw: bytes) -> None:
    fleet = with_offer({}, raw)
    fleet.finish()
    assert fleet.errors() == []
    assert check(fleet).settled["l1", 1, 0] == "bad_record"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"payload_digest": "../../x y"}, id="digest that is no part of a key"),
        pytest.param({"payload_digest": "d" * 2000}, id="digest longer than a key"),
        pytest.param({"loss": 10**400}, id="number too large for a float"),
        pytest.param(
            {"steps": 10**310, "tokens": 4 * 10**310, "data_end": 4 * 10**310}, id="more steps than a float holds"
        ),
        pytest.param({"timings": {"upload_s": 1e308, "adoption_s": 1e308}}, id="upload that never ends"),
    ],
)
def test_an_offer_with_absurd_values_does_not_end_the_syncer(changes: dict[str, Any]) -> None:
    fleet = with_offer(changes)
    fleet.world.run(fleet.ended, 30)
    assert fleet.errors() == []


def test_a_learner_cannot_claim_more_steps_than_anybody_could_have_made() -> None:
    steps = 10**6
    fleet = with_offer({"steps": steps, "tokens": steps * BATCH_TOKENS, "data_end": steps * BATCH_TOKENS})
    fleet.finish()
    assert check(fleet).settled["l1", 1, 0] == "bad_claim"


def test_an_offer_without_weight_does_not_fill_the_quorum() -> None:
    run = make_run(merges=8, quorum=2)
    fleet = with_offer({"steps": 0, "tokens": 0, "data_end": 0})
    fleet.run = run
    fleet.kill_all()
    fleet.syncer()
    fleet.learner("l0")
    fleet.world.run(fleet.ended, 1.0)
    for commit in (json.loads(fleet.world.store.get(key) or b"") for key in fleet.world.store.list("commit/")):
        assert all(item["weight"] > 0 for item in commit.get("inputs", []))


def test_a_quorum_that_returns_after_many_skipped_rounds_merges_again() -> None:
    run = make_run(merges=8, quorum=2, skip_after_s=0.5)
    fleet = Fleet(run)
    fleet.syncer()
    fleet.learner("l0")
    fleet.world.run(lambda: fleet.world.now_s > 6, 10)
    fleet.learner("l1")
    assert fleet.world.run(fleet.ended, 60)


def test_a_quorum_that_returns_after_a_skipped_round_merges_again() -> None:
    run = make_run(merges=8, quorum=2, skip_after_s=0.5)
    fleet = Fleet(run)
    fleet.syncer()
    fleet.learner("l0")
    fleet.world.run(lambda: len(fleet.world.store.list("commit/")) >= 3, 10)
    fleet.learner("l1")
    fleet.finish()
    assert {"skip", "merge"} <= set(check(fleet).kinds)


def test_a_lone_learner_goes_on_after_two_refusals() -> None:
    fleet = Fleet(make_run(learners=1, fragments=1, merges=8))
    fleet.refuse_payloads(lambda offer: "norm_cap" if 1 <= offer.seq <= 2 else None)
    fleet.start()
    assert fleet.world.run(fleet.ended, 60)


def test_a_refused_learner_does_not_stop_the_others() -> None:
    fleet = Fleet(RUN)
    fleet.refuse_payloads(lambda offer: "non_finite" if offer.learner == "l1" else None)
    fleet.start().finish()
    outcomes = check(fleet).settled
    assert {outcome for (learner, _, _), outcome in outcomes.items() if learner == "l0"} >= {"applied"}
    assert "applied" not in {outcome for (learner, _, _), outcome in outcomes.items() if learner == "l1"}


def test_one_of_many_learners_is_enough_at_quorum_one() -> None:
    run = make_run(learners=4, merges=8)
    fleet = Fleet(run)
    fleet.syncer()
    fleet.learner("l2")
    fleet.finish(120)
    assert check(fleet).kinds.count("merge") >= 8


def test_every_offer_that_the_syncer_saw_has_a_outcome_at_the_end() -> None:
    fleet = Fleet(RUN).start()
    fleet.finish()
    outcomes = check(fleet).settled
    last = max(outcomes, key=lambda offer: offer[2])[2]
    assert {(name, 1, seq) for name in ("l0", "l1") for seq in range(last)} <= set(outcomes)


def test_a_bad_record_gets_one_outcome_across_restarts() -> None:
    run = make_run(learners=2, fragments=2, merges=8)
    fleet = with_offer({"slot": 1, "fragment": 1})  # waits for slot 1 while the bad record behind it gets its outcome
    fleet.run = run
    fleet.world.store.create(offer_key("l1", 1, 1), b"torn")
    fleet.world.run(lambda: fleet.world.store.get("commit/000000000001.json") is not None, 20)
    (syncer,) = fleet.living("syncer")
    fleet.world.kill(syncer)
    fleet.syncer()
    fleet.finish()
    check(fleet)


def test_a_replaced_run_format_is_not_needed_by_anybody_who_runs() -> None:
    """The bucket's FORMAT.json is read once; everything else a process needs is in the log."""
    fleet = Fleet(replace(RUN, name="other")).start()
    fleet.world.store.delete("FORMAT.json")
    fleet.finish()
    assert fleet.errors() == []
