"""Once faults stop, commits go on; and nothing that lies in the bucket stops the syncer for good."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.digests import digest
from diloco_cli.protocol.log.keys import delta_key, offer_key
from diloco_cli.protocol.log.records import Offer, encode
from tests.histories.integers import gradient
from tests.simulation.sweeps import check, finished
from tests.simulation.toy import BATCH_TOKENS, ToyFleet, make_run

RUN = make_run(merges=8)
PAYLOAD = b"delta:%d" % gradient("l1", 0, 2 * BATCH_TOKENS)


def stranger(fleet: ToyFleet, **changes: Any) -> dict[str, Any]:
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


def with_offer(changes: dict[str, Any], raw: bytes | None = None) -> ToyFleet:
    """A run in which l1 only ever published that one offer, and l0 trains."""
    fleet = ToyFleet(RUN)
    fleet.syncer()
    fleet.until_commits(1)
    fields = stranger(fleet, **changes)
    fleet.world.store.create(delta_key("l1", 1, 0, digest(PAYLOAD)), PAYLOAD)
    fleet.world.store.create(offer_key("l1", 1, 0), encode(fields) if raw is None else raw)
    fleet.learner("l0")
    return fleet


def test_the_strangers_offer_is_sound_before_it_is_changed() -> None:
    fleet = with_offer({})
    assert finished(fleet).settled["l1", 1, 0] == "applied"


WRONG: list[tuple[dict[str, Any], str]] = [
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
    ({"slot": 400_000}, "too_early"),
    ({"data_start": BATCH_TOKENS}, "bad_claim"),
    ({"steps": 1}, "bad_claim"),
    ({"schema": 99}, "bad_record"),
    ({"tokens": 1}, "bad_claim"),
    ({"steps": -2, "data_end": -8}, "bad_record"),
    ({"steps": 10**6, "tokens": 10**6 * BATCH_TOKENS, "data_end": 10**6 * BATCH_TOKENS}, "bad_claim"),
    ({"seq": 1}, "bad_record"),
    ({"learner": "l0"}, "bad_record"),
    ({"incarnation": 2}, "bad_record"),
    ({"steps": "2"}, "bad_record"),
    ({"timings": []}, "bad_record"),
    ({"steps": 0, "tokens": 0, "data_end": 0}, "no_weight"),
]


@pytest.mark.parametrize(("changes", "outcome"), WRONG)
def test_a_wrong_offer_gets_its_outcome_and_the_run_goes_on(changes: dict[str, Any], outcome: str) -> None:
    fleet = with_offer(changes)
    assert finished(fleet).settled["l1", 1, 0] == outcome


@pytest.mark.parametrize("raw", [b"", b"null", b"{", b"[" * 100_000, b'{"seq":NaN}', b"\xff\xfe", b'{"seq":1,"seq":1}'])
def test_a_torn_offer_gets_its_outcome_and_the_run_goes_on(raw: bytes) -> None:
    fleet = with_offer({}, raw)
    assert finished(fleet).settled["l1", 1, 0] == "bad_record"


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


def test_an_offer_without_weight_does_not_fill_the_quorum() -> None:
    run = make_run(merges=8, quorum=2)
    fleet = with_offer({"steps": 0, "tokens": 0, "data_end": 0})
    fleet.run = run
    fleet.kill_all()
    fleet.syncer()
    fleet.learner("l0")
    fleet.world.run(fleet.ended, 1.0)
    assert all(item["weight"] > 0 for commit in fleet.records() for item in commit.get("inputs", []))


@pytest.mark.parametrize("away_s", [0.6, 6.0], ids=["a round", "many"])
def test_a_quorum_that_returns_after_skipped_rounds_merges_again(away_s: float) -> None:
    fleet = ToyFleet(make_run(merges=8, quorum=2, skip_after_s=0.5))
    fleet.syncer()
    fleet.learner("l0")
    fleet.world.run_for(away_s)
    assert "skip" in fleet.kinds() and "merge" not in fleet.kinds()
    fleet.learner("l1")
    assert "merge" in finished(fleet).kinds


def test_a_bad_record_gets_one_outcome_across_restarts() -> None:
    run = make_run(learners=2, fragments=2, merges=8)
    fleet = with_offer({"slot": 1, "fragment": 1})  # waits for slot 1 while the bad record behind it gets its outcome
    fleet.run = run
    fleet.world.store.create(offer_key("l1", 1, 1), b"torn")
    fleet.until_commits(2)
    fleet.kill("syncer")
    fleet.syncer()
    fleet.finish()
    check(fleet)


def test_a_replaced_run_format_is_not_needed_by_anybody_who_runs() -> None:
    """The bucket's FORMAT.json is read once; everything else a process needs is in the log."""
    fleet = ToyFleet(replace(RUN, name="other")).start()
    fleet.world.store.delete("FORMAT.json")
    fleet.finish()
    assert fleet.errors() == []
