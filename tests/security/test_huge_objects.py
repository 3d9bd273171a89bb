"""A learner may write under its own keys, and may put 100 GB there: whoever reads goes on, with the memory it had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError
from diloco_cli.observe.facts import read_facts
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import (
    HEAD_HINT_KEY,
    delta_key,
    heartbeat_key,
    incarnation_key,
    max_fragment_bytes,
    offer_key,
    request_key,
)
from diloco_cli.protocol.log.records import Offer, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.local import LocalStore
from diloco_cli.store.port import Store
from tests.faulty_world import FaultyWorld
from tests.security.hostile_input import bounded_memory
from tests.simulation.regional import RegionalFleet, regional_run
from tests.simulation.toy import BATCH_TOKENS, ToyFleet, make_run

HUGE_BYTES = 100_000_000_000
MAY_GROW_BYTES = 1 << 30
STRANGER = "l2"
CLOCK = SystemClock(lambda: 0.0, lambda seconds: None, lambda: None)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    with bounded_memory(MAY_GROW_BYTES):
        yield


@pytest.fixture
def fleet(tmp_path: Path) -> ToyFleet:
    """Of three learners, one of which never speaks; its files are written by the test."""
    (tmp_path / "store").mkdir()
    fleet = ToyFleet(make_run(learners=3, merges=8), FaultyWorld(store=LocalStore(tmp_path / "store")))
    fleet.syncer()
    fleet.learner("l0")
    fleet.learner("l1")
    return fleet.until_commits(1)


def make_huge(fleet: ToyFleet, key: str, store: Store | None = None) -> None:
    """A sparse file: it takes no room on the disk."""
    path = Path((store or fleet.world.store).url.removeprefix("file://"), key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, HUGE_BYTES)


def head(fleet: ToyFleet) -> RunState:
    return perform(read_log(fleet.run), fleet.world.store, CLOCK)


def offered(state: RunState, seq: int, **fields: object) -> Offer:
    """An eligible offer of the stranger's, but for its payload."""
    current = state.outputs[0]
    offer = Offer(
        learner=STRANGER, incarnation=1, seq=seq, slot=2 * seq, fragment=0, base=current.version,
        base_digest=current.weights_digest, data_start=0, data_end=BATCH_TOKENS, tokens=BATCH_TOKENS, steps=1,
        payload_digest=digest(b"delta:1"), payload_bytes=7, nonce="n",
    )  # fmt: skip
    return replace(offer, **fields)  # type: ignore[arg-type]


def outcomes(fleet: ToyFleet, learner: str = STRANGER) -> dict[int, str]:
    """Of this learner's offers, by the log."""
    every = (outcome for record in fleet.records() for outcome in record["outcomes"])
    return {outcome["seq"]: outcome["reason"] for outcome in every if outcome["learner"] == learner}


def test_the_run_goes_on_and_each_huge_offer_gets_its_outcome(fleet: ToyFleet) -> None:
    state = head(fleet)
    make_huge(fleet, incarnation_key(STRANGER, 2))
    make_huge(fleet, request_key(0))
    make_huge(fleet, offer_key(STRANGER, 1, 0))
    deltas = [offered(state, 1), offered(state, 2, payload_bytes=HUGE_BYTES)]
    for offer in deltas:
        make_huge(fleet, delta_key(*offer.id, offer.payload_digest))
        fleet.world.store.create(offer_key(*offer.id), encode(offer))
    fleet.finish()
    assert fleet.errors() == [] and head(fleet).phase == "FINISHED"
    assert outcomes(fleet) == {0: "bad_record", 1: "wrong_size", 2: "bad_claim"}
    assert head(fleet).next_request == 1


def test_a_regions_bucket_full_of_them_holds_nobody_up(tmp_path: Path) -> None:
    """Nothing huge is carried home, and nothing of it read but a beginning."""
    (tmp_path / "far").mkdir()
    fleet = RegionalFleet(regional_run(learners=3))
    fleet.far = LocalStore(tmp_path / "far")
    silent = fleet.run.islands[-1].name
    fleet.syncer()
    for island in fleet.run.islands[:-1]:
        fleet.learner(island.name)
    fleet.until_commits(1)
    state = head(fleet)
    make_huge(fleet, request_key(0), fleet.far)
    make_huge(fleet, heartbeat_key(silent), fleet.far)
    make_huge(fleet, offer_key(silent, 1, 2), fleet.far)
    fleet.far.create(incarnation_key(silent, 1), b"{}")
    for offer in (offered(state, 0, learner=silent, payload_bytes=HUGE_BYTES), offered(state, 1, learner=silent)):
        make_huge(fleet, delta_key(*offer.id, offer.payload_digest), fleet.far)
        fleet.far.create(offer_key(*offer.id), encode(offer))
    fleet.finish()
    assert fleet.errors() == [] and fleet.stops == [] and head(fleet).phase == "FINISHED"
    assert outcomes(fleet, silent) == {0: "bad_claim", 1: "missing_payload"}


def test_a_huge_object_in_the_place_of_ones_own_costs_the_loser_no_memory(fleet: ToyFleet) -> None:
    """A create reads what it lost to."""
    make_huge(fleet, offer_key("l0", 1, 2))
    fleet.world.run(fleet.ended, 60.0)
    assert [type(error).__name__ for error in fleet.errors()] == ["FencedError"]


def test_whoever_looks_at_the_run_goes_on(fleet: ToyFleet) -> None:
    fleet.finish()
    for key in (heartbeat_key("l0"), heartbeat_key(STRANGER), heartbeat_key("syncer"), HEAD_HINT_KEY):
        make_huge(fleet, key)
    facts = read_facts("url", fleet.run, fleet.world.store, CLOCK)
    assert facts.state.phase == "FINISHED" and facts.syncer is None
    assert set(facts.learners) == {"l1"}, "whose heartbeat is its own"


def test_a_replay_names_what_is_too_long(fleet: ToyFleet) -> None:
    fleet.finish()
    state = head(fleet)
    output = state.outputs[0]
    key = next(key for key in fleet.world.store.list("weights/") if output.weights_digest in key)
    make_huge(fleet, key)
    found = LogVerifier(fleet.world.store, fleet.run)
    assert found._present(key, max_fragment_bytes(fleet.run.layout, 0), output.weights_digest) is None
    assert found.found.mismatches == [f"{key}: other bytes than the log says"]


def test_a_run_whose_format_is_huge_cannot_be_opened_and_says_why(fleet: ToyFleet) -> None:
    from diloco_cli.protocol.log.commit_log import read_format

    make_huge(fleet, "FORMAT.json")
    with pytest.raises(DataCheckError, match="more than"):
        perform(read_format("url"), fleet.world.store, CLOCK)


def test_a_claimed_size_is_compared_with_the_layouts() -> None:
    run = make_run()
    for fragment in range(run.num_fragments):
        honest = 8 * run.layout.fragments[fragment].num_parameters
        assert honest < max_fragment_bytes(run.layout, fragment) < honest + 100_000
    assert max_fragment_bytes(run.layout, 99) < 100_000
