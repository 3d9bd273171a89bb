"""What a link carries: by hand, and sizes of records as the protocol writes them."""

from __future__ import annotations

import pytest

from diloco_cli.config.settings import Link
from diloco_cli.plan.link import (
    CLIENT_BPS,
    HEARTBEAT_BYTES,
    OFFER_BYTES,
    commit_bytes,
    join_bytes,
    reached,
    rtt_of,
    to_store,
    transfer_s,
)
from diloco_cli.plan.planner import make_plan
from diloco_cli.protocol.log.commits import Merge
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat
from diloco_cli.protocol.log.records import FragmentVersion, MergedOffer, Offer, Outcome, Timings, encode
from tests.unit.plan.fleets import IOWA, MODEL, OLD, RUN, SPOT, fleet, with_sync

DIGEST = "blake3-" + "0123456789abcdef" * 4
NONCE = "0123456789abcdef" * 2
SECONDS = 0.4190106668647197
NORM = 0.73218046
PAYLOAD = (123_456_789, DIGEST, 154_244)


def some_input(learner: str) -> MergedOffer:
    data = {"base": 1190, "data_start": 934_912, "data_end": 961_536, "tokens": 26_624, "steps": 26}
    return MergedOffer(
        learner,
        1,
        100,
        **data,
        weight=20971520.0,
        payload_digest=DIGEST,
        payload_bytes=154_244,
        step_s=SECONDS,
        norm=NORM,
    )


def some_commit(num_islands: int) -> Merge:
    return Merge(
        n=1220, epoch=1, nonce=NONCE, previous=DIGEST, time="2026-11-21T05:49:12.591Z", software="0.2.0",
        slot=1170, inputs=tuple(some_input(f"iowa{i}") for i in range(num_islands)),
        outcomes=(Outcome("iowa", 1, 99, 1, "superseded"),),
        outputs=(FragmentVersion(1, 1220, 1170, 1, DIGEST, DIGEST),),
        tokens=79_872, quorum=1, alive=3, grace_s=0.297751, grace_used_s=0.316144,
        reason="2 of 3 after 0.15 s of grace (0.5 of 0.29 s slack, at most one slot of 0.29 s)",
    )  # fmt: skip


def some_offer() -> Offer:
    return Offer(
        "iowa", 1, 100, 1170, 1, 1190, DIGEST, 934_912, 961_536, 26_624, 26, DIGEST, 154_244, NONCE,
        Timings(SECONDS, SECONDS, SECONDS, SECONDS), 1.930289626121521,
        f"inner/iowa/00000001/000000000800-{DIGEST}",
    )  # fmt: skip


@pytest.mark.parametrize("num_islands", [1, 3, 8])
def test_records_are_as_large_as_the_protocol_writes_them(num_islands: int) -> None:
    assert commit_bytes(num_islands) == pytest.approx(len(encode(some_commit(num_islands))), rel=0.12)
    assert pytest.approx(len(encode(some_offer())), rel=0.12) == OFFER_BYTES
    counters = (35_365_664, 30_246_518, 4952)
    heartbeat = LearnerHeartbeat("TRAINING", 1, 238, 1896, 1_941_504, 23172.3, 0, 20913.0, 1.5395443, *counters)
    assert pytest.approx(len(encode(heartbeat)), rel=0.12) == HEARTBEAT_BYTES


def test_a_round_of_a_large_model_is_fragments_and_a_little() -> None:
    """2e9 bytes of deltas and 8e9 / 20 of moments up, 2e9 down; 24 offers and commits of three islands beside them."""
    plan = make_plan(RUN, fleet(IOWA, SPOT, OLD), MODEL)
    round_s, iowa = plan.schedule.round_s, plan.islands[0]
    assert iowa.sent_mbps == pytest.approx(8 * ((2.4e9 + 24 * 700) / round_s + 260 / 3) / 1e6)
    assert iowa.received_mbps == pytest.approx(8 * (2e9 + 24 * (800 + 3 * 300)) / round_s / 1e6)
    assert iowa.received_mbps == pytest.approx(iowa.down_mbps_needed, rel=1e-4)


def test_a_process_that_joins_downloads_every_fragment_once() -> None:
    assert join_bytes(MODEL, with_sync(weights_codec="int8").sync) == pytest.approx(1e9 * 8.125 / 8)


def test_a_round_trip_that_is_not_stated_is_guessed_by_its_store_and_nowhere_else() -> None:
    unknown = Link()
    assert [rtt_of(unknown, url) for url in ("gs://bucket", "s3://bucket", "file:///runs")] == [0.05, 0.05, 0.001]
    assert rtt_of(Link(rtt_s=0.0), "gs://bucket") == 0.0
    assert transfer_s(unknown, rtt_of(unknown, "file:///runs"), 1e9, "int8", "bf16") == pytest.approx(4 * 0.001)


@pytest.mark.parametrize("url", ["gs://bucket", "s3://bucket/runs"])
def test_a_process_moves_no_more_to_a_bucket_than_one_core_does(url: str) -> None:
    fast, slow = Link(up_bps=100e9, down_bps=10e9, rtt_s=0.03), Link(up_bps=1e9, down_bps=None)
    assert reached(fast, url) == Link(CLIENT_BPS, CLIENT_BPS, 0.03)
    assert reached(slow, url) == slow
    assert reached(fast, "file:///runs") == fast
    assert to_store(slow, url) == Link(1e9, None, 0.05)
