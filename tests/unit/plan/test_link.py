"""What a link carries: by hand, and sizes of records as the protocol writes them."""

from __future__ import annotations

import re

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.models import facts_from_numbers
from diloco_cli.config.settings import (
    InnerSettings,
    Inventory,
    Link,
    RunSettings,
    StoreSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.forecast.run import BRIEF, confirmed, report, run_of_plan, simulated
from diloco_cli.plan.link import (
    CLIENT_BPS,
    GUESSED_MACHINE,
    HEARTBEAT_BYTES,
    OFFER_BYTES,
    commit_bytes,
    join_bytes,
    kept_at_pace,
    machine_of,
    moments_share,
    reached,
    rtt_of,
    sent_beside_moments,
    to_store,
    transfer_s,
    waiting_s,
)
from diloco_cli.plan.plan import Plan
from diloco_cli.plan.planner import explain, make_plan
from diloco_cli.protocol.log.commits import Merge
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat
from diloco_cli.protocol.log.records import FragmentVersion, MergedOffer, Offer, Outcome, Timings, encode
from tests.unit.plan.fleets import IOWA, MODEL, OLD, RUN, SPOT, fleet, island, with_sync

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
    assert iowa.sent_mbps == pytest.approx(8 * ((2.4e9 + 24 * 700) / round_s + 349 / 3) / 1e6)
    assert iowa.received_mbps == pytest.approx(8 * (2e9 + 24 * (800 + 3 * 350)) / round_s / 1e6)
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


SMALL = facts_from_numbers(1_000_000, 8, 64, 64)
LARGE = facts_from_numbers(400_000_000, 16, 1024, 64)
NEAR = Link(rtt_s=0.005)
PACED = RunSettings("paced", train=TrainSettings(tokens=10**9), sync=SyncSettings(every=16, fragments=8))


def inventory_of(count: int = 4, **link: float) -> Inventory:
    """Islands of a step of 0.1 s; the syncer's own link to its bucket."""
    islands = tuple(island(f"i{n}", batch=6400, link=NEAR, tokens_per_s=64_000.0) for n in range(count))
    return Inventory(StoreSettings("gs://bucket", link=Link(**link)), islands)


def of_s3(inventory: Inventory) -> Inventory:
    return replace(inventory, store=replace(inventory.store, url="s3://bucket"))


def planned(inventory: Inventory, run: RunSettings = PACED, model: object = SMALL) -> Plan:
    return make_plan(run, inventory, model)  # type: ignore[arg-type]


def warned(plan: Plan) -> list[str]:
    return [warning for warning in plan.warnings if warning.startswith("the syncer")]


def test_a_syncer_that_keeps_pace_is_described_and_not_warned_about() -> None:
    needs = planned(inventory_of(rtt_s=0.005)).syncer
    assert needs.limit == "calls" and needs.busy_percent == pytest.approx(100 * needs.fastest_slot_s / 0.2)
    assert needs.fastest_slot_s == pytest.approx(needs.calls_s + needs.bytes_s + needs.processor_s)
    assert needs.max_islands > 4 and not warned(planned(inventory_of(rtt_s=0.005)))


@pytest.mark.parametrize(
    ("inventory", "model", "limit", "hint"),
    [
        (inventory_of(rtt_s=0.05), SMALL, "calls", r"store\.link\.rtt"),
        (inventory_of(rtt_s=0.001, up_bps=2e9, down_bps=2e9), LARGE, "bytes", "its link.*store.link"),
    ],
)
def test_what_a_warning_names_is_enough(inventory: Inventory, model: object, limit: str, hint: str) -> None:
    plan = planned(inventory, model=model)
    assert plan.syncer.limit == limit and plan.syncer.busy_percent > 100
    (warning,) = warned(plan)
    assert "cannot hold slots" in warning and re.search(hint, warning)
    for key, value in re.findall(r"--set sync\.(every|fragments)=(\d+)", warning):
        changed = replace(PACED, sync=replace(PACED.sync, **{key: int(value)}))
        assert not warned(planned(inventory, changed, model)), key


def test_a_codec_that_would_not_be_enough_is_not_offered() -> None:
    """Where state and weights take the link, smaller deltas do not free it."""
    (warning,) = warned(planned(inventory_of(rtt_s=0.001, up_bps=2e9, down_bps=2e9), model=LARGE))
    assert "sync.codec" not in warning


def test_a_nearly_busy_syncer_is_warned_about_before_it_is_late() -> None:
    (warning,) = warned(planned(inventory_of(rtt_s=0.04)))
    assert warning.startswith("the syncer needs ") and "--set sync.every=" in warning


def merged_per_s(plan: Plan) -> tuple[float, float]:
    """(seconds from merge to merge, tokens merged a second) of a simulated run, after its first rounds."""
    served_s = max(plan.schedule.slot_s, plan.syncer.fastest_slot_s)
    made = run_of_plan(plan, "simulated", "test")
    played = [simulated(made, {}, (), 0, slots * served_s, machine_of(plan.inventory.store)) for slots in (24, 96)]
    first, whole = (report(fleet, {}) for fleet in played)
    seconds = whole.simulated_s - first.simulated_s
    return seconds / (whole.merges - first.merges), (whole.tokens - first.tokens) / seconds


@pytest.mark.parametrize("mixing", ["replace", "rebase"])
def test_a_simulated_run_shows_what_the_plan_predicts(mixing: str) -> None:
    """Of a syncer that needs 3.4 slots for a merge: merges within 12 %, tokens within 20 %, with what replacement gives
    up in flight."""
    sync = replace(PACED.sync, mixing=mixing)  # type: ignore[arg-type]
    plan = planned(inventory_of(rtt_s=0.12), replace(PACED, sync=sync))
    assert plan.syncer.busy_percent == pytest.approx(340, rel=0.05)
    served_s, tokens_per_s = merged_per_s(plan)
    assert served_s == pytest.approx(plan.syncer.fastest_slot_s, rel=0.12)
    assert tokens_per_s == pytest.approx(plan.prediction.tokens_per_s, rel=0.2)


def test_what_is_read_back_takes_a_call_more_a_merge() -> None:
    checked, read_back = planned(inventory_of(rtt_s=0.25)), planned(of_s3(inventory_of(rtt_s=0.25)))
    assert (checked.syncer.reads_back, read_back.syncer.reads_back) == (False, True)
    assert read_back.syncer.fastest_slot_s - checked.syncer.fastest_slot_s == pytest.approx(0.25, rel=0.02)
    assert read_back.syncer.memory_gb > checked.syncer.memory_gb
    told = [assumption.text for assumption in read_back.assumptions if "reads versions back" in assumption.text]
    assert told and not [a for a in checked.assumptions if "reads versions back" in a.text]


def test_fewer_connections_take_longer() -> None:
    """Of 4 learners on one connection: 4 calls for their offers, 8 behind them, 2 for a version, and the commit. In
    turns of 0.9 s requests (2 calls) and incarnations (4) are looked for in each second one, and each 4th sends a
    heartbeat."""
    many = inventory_of(rtt_s=0.05)
    plan = planned(replace(many, store=replace(many.store, connections=1)))
    beside = 2 / 2 + 4 / 2 + 1 / 4
    assert plan.syncer.calls_s == pytest.approx(0.05 * (4 + 8 + 2 + 1 + beside), rel=0.01)
    assert planned(many).syncer.calls_s < plan.syncer.calls_s / 2.5
    texts = {line.name: line.numbers for line in explain(plan) if line.of == "schedule"}
    assert texts["calls of a merge"] == "15 * 0.05"


def test_bytes_requests_and_storage_go_by_the_slots_that_are_served() -> None:
    """The islands' deltas, in a run whose merges come 4 times as late, are a fourth; likewise what is kept a day."""
    free, late = planned(inventory_of(rtt_s=0.01)), planned(inventory_of(rtt_s=0.14))
    times = late.syncer.fastest_slot_s / late.schedule.slot_s
    assert times == pytest.approx(4, rel=0.05)
    for of in ("egress_gb_per_day", "storage_gb_per_day"):
        assert getattr(late.money, of) * times == pytest.approx(getattr(free.money, of)), of
    assert late.money.class_a_per_day < free.money.class_a_per_day / 2
    assert late.money.class_b_per_day < free.money.class_b_per_day / 2
    for of in ("down_mbps", "up_mbps", "merge_percent"):
        assert getattr(late.syncer, of) * times == pytest.approx(getattr(free.syncer, of)), of


def test_beyond_its_pace_less_is_merged() -> None:
    free = planned(inventory_of(rtt_s=0.005))
    late = [planned(inventory_of(rtt_s=rtt_s)) for rtt_s in (0.04, 0.16, 0.4)]
    rates = [plan.prediction.tokens_per_s / free.prediction.tokens_per_s for plan in late]
    assert max(rates) < 0.95 and rates[-1] < 0.5


def test_what_is_kept_is_what_an_offer_may_hold() -> None:
    assert [kept_at_pace(SyncSettings(), load) for load in (0.5, 1.0, 6.0)] == [1.0, 1.0, 1.0]
    assert kept_at_pace(SyncSettings(), 16.0) == 0.375  # an offer holds 8 rounds at most, 3/4 of that as seen
    assert [waiting_s(1.0, spent_s) for spent_s in (0.1, 0.75, 1.0, 3.0)] == pytest.approx(
        [0.0, 0.08, 0.33, 3.0], abs=0.005
    )


def test_the_machine_is_what_the_inventory_states_and_a_guess_elsewhere() -> None:
    """A directory has what fsync confirms, and GCS checks uploads."""
    assert machine_of(inventory_of().store) == replace(GUESSED_MACHINE, reads_back=False)
    assert machine_of(of_s3(inventory_of()).store) == GUESSED_MACHINE
    stated = machine_of(inventory_of(rtt_s=0.0, up_bps=1e9).store)
    assert (stated.call_s, stated.up_bps, stated.down_bps) == (0.0, 1e9, GUESSED_MACHINE.down_bps)
    folder = StoreSettings("file:///runs")
    assert machine_of(folder).call_s == 0.001 and not machine_of(folder).reads_back


def test_offers_have_half_of_the_uplink_while_moments_travel() -> None:
    """Of a round, of which deltas alone take .4 or .8, and moments .1: these have what deltas leave, or half."""
    assert moments_share(0.1, 0.4) == pytest.approx(0.1 / 0.6) and moments_share(0.1, 0.8) == pytest.approx(0.2)
    assert moments_share(0.9, 0.9) == 1.0
    assert sent_beside_moments(0.2, 0.4) == 1.0, "half is enough"
    assert sent_beside_moments(0.2, 0.8) == pytest.approx(1 - 0.2 * (1 - 0.5 / 0.8))


def test_moments_cost_a_simulated_run_what_they_cost_the_plan() -> None:
    """An uplink that is .45 busy with deltas, and .36 with moments that are saved every tenth round."""
    rates = []
    for save_every in (10, 1000):
        train = replace(PACED.train, inner=InnerSettings(save_every=save_every))
        run = replace(PACED, train=train, sync=replace(PACED.sync, every=24, codec="int8"))
        islands = tuple(replace(island, link=Link(30e6, None, 0.005)) for island in inventory_of(2).islands)
        inventory = replace(inventory_of(2), islands=islands)
        found = confirmed(planned(inventory, run, facts_from_numbers(4_000_000, 8, 64, 64)), span=BRIEF)
        rates.append((found.planned_tokens_per_s, found.tokens_per_s))
    (planned_with, with_them), (planned_without, without) = rates
    assert 0.9 < planned_with / planned_without < 0.97
    assert with_them / without == pytest.approx(planned_with / planned_without, abs=0.02)
