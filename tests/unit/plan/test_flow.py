"""What links, exchanges and failures cost: against the published bandwidths, and by hand."""

from __future__ import annotations

import math
from itertools import product
from math import prod

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.settings import IslandSettings, Link, RegionSettings
from diloco_cli.plan import flow
from diloco_cli.plan.candidates import availability_of, candidates
from diloco_cli.plan.flow import (
    LEARNERS_LOOKS,
    OF_A_STEP,
    SYNCERS_LOOKS,
    Fleet,
    busy_share,
    catching_up_s,
    costs,
    dropped_share,
    kept_in_flight,
    looks_per_s,
    probability_at_least,
    requests_per_day,
    run_fleet,
    waiting,
)
from diloco_cli.plan.link import moment_bytes
from diloco_cli.plan.planner import explain, make_plan
from tests.unit.plan.fleets import FAST, IOWA, MODEL, OLD, RUN, SPOT, fleet, with_sync

EVERY, FRAGMENTS, TAU = 100, 18, 2  # the setting that reproduces the table; H = P = 24 would need more


def test_an_exchange_inside_the_overlap_costs_nothing_and_beyond_it_what_is_left() -> None:
    assert busy_share(2.0, 6.0, 5.9) == 1.0
    assert busy_share(2.0, 6.0, 8.0) == 0.5


def test_replacement_gives_up_what_was_learned_in_flight_and_rebasing_keeps_it() -> None:
    everyone = candidates(with_sync(), fleet(IOWA, SPOT, OLD), MODEL)
    replaced = run_fleet(everyone, with_sync(mixing="replace").sync, MODEL)
    rebased = run_fleet(everyone, with_sync(mixing="rebase").sync, MODEL)
    for candidate, gone, kept in zip(everyone, replaced.flows, rebased.flows, strict=True):
        in_flight_s = gone.in_flight_s + OF_A_STEP * candidate.step_s
        share = max(candidate.step_s, in_flight_s) / replaced.schedule.round_s
        assert gone.after_link == pytest.approx(kept.after_link * (1 - share))
        assert kept.after_link == pytest.approx(kept.after_idle)
    assert dropped_share(0.0, 2.0, 20.0) == 0.1, "adopted at the end of the next step at the earliest"
    assert kept_in_flight(0.1) == 0.9
    assert kept_in_flight(0.75) == pytest.approx(0.25)


AVAILABILITIES = (0.97, 0.90, 0.95, 0.98)


@pytest.mark.parametrize("quorum", [0, 1, 2, 3, 4, 5])
def test_probabilities_equal_an_enumeration_of_all_outcomes(quorum):
    expected = sum(
        prod(p if here else 1 - p for p, here in zip(AVAILABILITIES, outcome, strict=True))
        for outcome in product((0, 1), repeat=4)
        if sum(outcome) >= quorum
    )
    assert probability_at_least(quorum, AVAILABILITIES) == pytest.approx(expected, abs=1e-12)


def test_availability_is_mtbf_over_mtbf_and_restart():
    island = IslandSettings("a", "here", Accelerators("cpu"), mtbf_s=900.0, restart_s=100.0)
    assert availability_of(island) == 0.9
    assert availability_of(IslandSettings("a", "here", Accelerators("cpu"))) == 1.0


def test_who_waits_for_merges_works_while_enough_of_the_others_are_there():
    """Of three islands that are there for 75 % of the time, one has at least one of the others beside it for 15/16."""
    assert waiting(2, [0.75] * 3, [1e-3] * 3, drift_s=0.0).moving == pytest.approx([15 / 16] * 3)
    assert waiting(3, [0.75] * 3, [1e-3] * 3, drift_s=0.0).moving == pytest.approx([9 / 16] * 3)
    assert waiting(2, [0.5, 1.0, 1.0], [1e-3, 0.0, 0.0], drift_s=0.0).moving == (1.0, 1.0, 1.0)
    assert waiting(1, [0.75] * 3, [1e-3] * 3, drift_s=0.0).moving == (1.0, 1.0, 1.0)


def test_who_steps_on_up_to_a_drift_bound_loses_only_the_long_absences():
    """Two islands, an hour up, 20 minutes away: the quorum of both is lost 2 x 0.75^2 times an hour and missing
    for 7/16 of the time, so for 7/16 / (2 x 9/16) h = 1400 s on average."""
    short, mean = (waiting(2, [0.75] * 2, [1 / 3600] * 2, drift_s) for drift_s in (0.0, 1400.0))
    assert short.still == 1 and short.moving == pytest.approx([0.75] * 2)
    assert mean.still == pytest.approx(math.exp(-1))
    assert mean.moving == pytest.approx([1 - 0.25 * math.exp(-1)] * 2)
    assert waiting(2, [0.75] * 2, [1 / 3600] * 2, math.inf).moving == (1.0, 1.0)


def test_for_many_islands_who_exactly_is_left_out_makes_no_difference(monkeypatch):
    availabilities, rates = [0.5 + 0.004 * i for i in range(100)], [1e-4] * 100
    exact = waiting(70, availabilities, rates, 1000.0)
    monkeypatch.setattr(flow, "MAX_TERMS", 0)
    quick = waiting(70, availabilities, rates, 1000.0)
    assert 0.01 < exact.still < 0.99 and len(set(quick.moving)) == 1 < len(set(exact.moving))
    assert quick.still == pytest.approx(exact.still, abs=0.01)
    assert quick.moving == pytest.approx(exact.moving, abs=0.03)


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
    of_learners = 2 * ((5.2 + 1) / slot + 1 / 5 + 1 / 10)
    of_syncer = 2 * (3.8 + 1) / slot + 2 / slot + 2 / 2  # requests and successors each 2 s
    of_syncer += (
        49 + math.ceil(10 / slot)
    ) / 10  # the format, 48 recent commits, and those that came since the last look
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
    assert moment_bytes(RUN.train.inner, MODEL) == 8 / 20
    plain = replace(RUN.train.inner, name="sgd")
    assert moment_bytes(plain, MODEL) == 0.0


def test_an_island_in_its_buckets_region_pays_no_egress() -> None:
    paying = fleet(replace(IOWA, egress_per_gb=0.05))
    at_home = replace(paying, store=replace(paying.store, region="here"))
    elsewhere = replace(paying, store=replace(paying.store, region="there"))
    own_bucket = replace(elsewhere, regions={"here": RegionSettings(store="gs://near")})
    found = [candidates(RUN, inventory, MODEL)[0].egress_per_gb for inventory in (at_home, elsewhere, own_bucket)]
    assert found == [0.0, 0.05, 0.0]
    texts = [[a.text for a in make_plan(RUN, i, MODEL).assumptions] for i in (at_home, elsewhere)]
    assert [any("downloads out of the store's region" in text for text in each) for each in texts] == [False, True]


def test_downloads_out_of_the_buckets_region_are_charged_and_a_region_has_a_price_for_its_islands() -> None:
    inventory = fleet(IOWA, replace(SPOT, region="eu"))
    prices = {"here": RegionSettings(egress_per_gb=0.12), "eu": RegionSettings(egress_per_gb=0.08)}
    priced = replace(inventory, store=replace(inventory.store, region="here"), regions=prices)
    made = make_plan(RUN, priced, MODEL)
    of, m, version_gb = {i.name: i for i in made.islands}, made.money, 2 * DAY_S / made.schedule.round_s
    assert (of["iowa"].egress_per_day, of["iowa"].downloads_per_day) == (0.0, 0.0)
    assert of["spot"].egress_per_day == pytest.approx((version_gb + 8 / 20 * DAY_S / made.schedule.round_s) * 0.08)
    assert of["spot"].downloads_per_day == m.downloads_per_day == pytest.approx(version_gb * 0.12)
    assert m.downloads_gb_per_day == pytest.approx(version_gb)
    free = replace(priced, islands=tuple(replace(i, egress_per_gb=0.0) for i in priced.islands))
    assert {i.egress_per_day for i in make_plan(RUN, free, MODEL).islands} == {0.0}  # a stated 0 is a price, too
    unpriced = make_plan(RUN, inventory, MODEL)
    assert m.total > unpriced.money.total and unpriced.money.downloads_per_day == 0.0
    said = [any("downloads out of" in a.text for a in plan.assumptions) for plan in (made, unpriced)]
    assert said == [False, True]


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
    for name in ("egress of mirrors", "money in all"):
        assert eval(explained[name].numbers) == pytest.approx(explained[name].value, rel=1e-3)  # plain arithmetic
    shared = make_plan(RUN, replace(inventory, store=store, regions={**prices, "eu": RegionSettings()}), MODEL)
    assert (shared.money.mirrors_gb_per_day, shared.money.mirrors_per_day) == (0.0, 0.0)


def test_a_failure_costs_the_more_the_fuller_the_downlink() -> None:
    """As in virtual time, in rounds; an island that does not fail loses nothing by it."""
    assert [catching_up_s(busy, 1.0) for busy in (0.5, 0.7, 0.8, 0.9, 0.95)] == pytest.approx(
        [0.6, 1.4, 2.4, 5.4, 10.4], rel=0.1
    )
    for mtbf_s, share in ((None, 1.0), (10_800.0, 0.977)):
        narrow, wide = (
            run_fleet(candidates(RUN, fleet(replace(IOWA, mtbf_s=mtbf_s, link=link)), MODEL), RUN.sync, MODEL).flows[0]
            for link in (Link(2e9, 0.18e9, 0.005), FAST)
        )
        lost = (narrow.after_failures / narrow.after_link) / (wide.after_failures / wide.after_link)
        assert lost == pytest.approx(share, abs=0.003)
