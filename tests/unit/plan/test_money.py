"""Money by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.config.settings import RegionSettings
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.flow import Fleet, run_fleet
from diloco_cli.plan.link import moment_bytes
from diloco_cli.plan.money import costs, poll_s, requests_per_day
from diloco_cli.plan.planner import make_plan
from tests.unit.plan.fleets import IOWA, MODEL, RUN, SPOT, fleet

DAY_S = 86_400


def evaluated() -> Fleet:
    islands = fleet(replace(IOWA, egress_per_gb=0.05), replace(SPOT, egress_per_gb=0.02))
    return run_fleet(candidates(RUN, islands, MODEL), RUN.sync, MODEL)


def test_requests_are_counted_from_the_protocol() -> None:
    found, (writes, reads) = evaluated(), requests_per_day(evaluated(), RUN)
    slot = found.schedule.slot_s
    per_slot_written = 2 * 2 + 3 + 1 / 64 + 2 / (20 * 24)  # deltas, offers; state, cast, commit; snapshots; moments
    assert writes == pytest.approx((per_slot_written / slot + 3 / 3) * DAY_S)  # and three beats each 3 s
    poll = slot / 20
    of_learners = 2 * (2 / slot + 1 / poll + 1 / 5)
    of_syncer = (2 * 2 + 2) / slot + 2 / poll + 2 + 2
    assert reads == pytest.approx((of_learners + of_syncer) * DAY_S)


def test_polling_follows_the_slot_within_bounds() -> None:
    assert (poll_s(0.1), poll_s(4.0), poll_s(60.0)) == (0.02, 0.2, 0.5)


def test_all_money_adds_up() -> None:
    found = evaluated()
    money = costs(found, RUN, MODEL)
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
