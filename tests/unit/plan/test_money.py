"""Money by hand."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RegionSettings
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.flow import LEARNERS_LOOKS, SYNCERS_LOOKS, Fleet, costs, looks_per_s, requests_per_day, run_fleet
from diloco_cli.plan.link import moment_bytes
from diloco_cli.plan.planner import explain, make_plan
from tests.unit.plan.fleets import IOWA, MODEL, RUN, SPOT, fleet

DAY_S = 86_400


def evaluated() -> Fleet:
    islands = fleet(replace(IOWA, egress_per_gb=0.05), replace(SPOT, egress_per_gb=0.02))
    return run_fleet(candidates(RUN, islands, MODEL), RUN.sync, MODEL)


def test_requests_are_counted_from_the_protocol() -> None:
    found, (writes, reads) = evaluated(), requests_per_day(evaluated(), RUN)
    slot = found.schedule.slot_s
    per_slot_written = 2 * 2 + 3 + 1 / 64 + 2 / (20 * 24)  # deltas, offers; state, weights, commit; snapshots; moments
    assert writes == pytest.approx((per_slot_written / slot + 3 / 3) * DAY_S)  # and three heartbeats each 3 s
    assert 1.5 < slot < 5  # so the rare looks come once a slot, and the fences each 5 s
    of_learners = 2 * ((5.2 + 1) / slot + 1 / 5)
    of_syncer = 2 * (3.8 + 1) / slot + 2 / slot + 2 / 2  # requests and successors each 2 s
    assert reads == pytest.approx((of_learners + of_syncer) * DAY_S)


@pytest.mark.parametrize(
    ("slot_s", "learner", "syncer"),
    [
        (0.1, 1 / 0.02 + 10, 1 / 0.02 + 10),  # short slots: every 20 ms, and the find
        (1.2, 1 / 0.06 + 1 / 1.2, 1 / 0.06 + 1 / 1.2),
        (2.0, 2.6, 1.9),
        (60.0, 5.2 / 60, 3.8 / 60),
    ],
)
def test_looks_follow_the_slot(slot_s: float, learner: float, syncer: float) -> None:
    assert looks_per_s(slot_s, LEARNERS_LOOKS) == pytest.approx(learner)
    assert looks_per_s(slot_s, SYNCERS_LOOKS) == pytest.approx(syncer)


def test_storage_stays_when_the_retained_rounds_are_full() -> None:
    found = evaluated()
    short_run = replace(RUN, retention=replace(RUN.retention, rounds=2))
    money, growth = costs(found, short_run, MODEL), costs(found, RUN, MODEL).storage_gb_per_day
    slot_s = found.schedule.slot_s
    kept_days = ((2 * 24 + 12) * slot_s + 60.0) / DAY_S  # two rounds, a quarter of them, and the readers' grace
    days = RUN.train.tokens / found.tokens_per_s / DAY_S
    assert money.storage_gb_at_end == pytest.approx(growth * kept_days)
    assert money.storage_total == pytest.approx(growth * kept_days * (days - kept_days / 2) * 0.02 / 30)


def test_all_money_adds_up() -> None:
    found = evaluated()
    money = costs(found, replace(RUN, retention=replace(RUN.retention, rounds="all")), MODEL)
    days = RUN.train.tokens / found.tokens_per_s / DAY_S
    sent_gb = (2 + 8 / 20) * DAY_S / found.schedule.round_s  # of 1e9 parameters: bf16 deltas, moments each 20 rounds
    assert money.egress_gb_per_day == pytest.approx(2 * sent_gb)
    assert money.egress_per_day == pytest.approx(sent_gb * (0.05 + 0.02))
    kept_gb = (8 + 2 + 2 * (2 + 8 / 20)) * DAY_S / found.schedule.round_s
    assert money.storage_gb_at_end == pytest.approx(kept_gb * days)
    assert money.storage_total == pytest.approx(kept_gb * days * days / 2 * 0.02 / 30)
    total = days * (24 * 46.0 + money.egress_per_day + money.requests_per_day) + money.storage_total
    assert money.total == pytest.approx(total)
    assert money.per_h == pytest.approx(total / days / 24)
    assert money.per_billion_tokens == pytest.approx(total / 100)


def test_an_optimizer_without_moments_sends_none() -> None:
    assert moment_bytes(RUN.train.inner) == 8 / 20
    plain = replace(RUN.train.inner, name="sgd")
    assert moment_bytes(plain) == 0.0


def test_an_island_in_its_buckets_region_pays_no_egress() -> None:
    paying = fleet(replace(IOWA, egress_per_gb=0.05))
    at_home = replace(paying, store=replace(paying.store, region="here"))
    elsewhere = replace(paying, store=replace(paying.store, region="there"))
    own_bucket = replace(elsewhere, regions={"here": RegionSettings(store="gs://near")})
    found = [candidates(RUN, inventory, MODEL)[0].egress_per_gb for inventory in (at_home, elsewhere, own_bucket)]
    assert found == [0.0, 0.05, 0.0]
    texts = [[a.text for a in make_plan(RUN, i, MODEL).assumptions] for i in (at_home, elsewhere)]
    assert [any("downloads out of the store's region" in text for text in each) for each in texts] == [False, True]


def test_what_crosses_between_buckets_is_charged_where_it_leaves() -> None:
    inventory = fleet(replace(IOWA, egress_per_gb=0.05), replace(SPOT, region="eu", egress_per_gb=0.02))
    store, prices = replace(inventory.store, region="here"), {"here": RegionSettings(egress_per_gb=0.12)}
    for region, price in ((RegionSettings("gs://eu", 0.08), 0.08), (RegionSettings("gs://eu"), 0.02)):
        found = make_plan(RUN, replace(inventory, store=store, regions={**prices, "eu": region}), MODEL)
        gb = 2 * DAY_S / found.schedule.round_s  # 1e9 parameters in bf16, once a round each way
        assert found.money.mirrors_gb_per_day == pytest.approx(2 * gb)
        assert found.money.mirrors_per_day == pytest.approx(gb * (0.12 + price))
        assert found.money.egress_per_day == 0.0
    explained = {row.name: row for row in explain(found) if row.of == "money"}
    assert explained["egress of mirrors"].value == found.money.mirrors_per_day
    for name in ("between buckets", "egress of mirrors", "money in all"):
        assert eval(explained[name].numbers) == pytest.approx(explained[name].value, rel=1e-3)  # plain arithmetic
    shared = make_plan(RUN, replace(inventory, store=store, regions={**prices, "eu": RegionSettings()}), MODEL)
    assert (shared.money.mirrors_gb_per_day, shared.money.mirrors_per_day) == (0.0, 0.0)
