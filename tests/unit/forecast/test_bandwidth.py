"""Bandwidth for a compute utilisation: the published table, cases by hand, and laws of the steady state."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.forecast import bandwidth
from diloco_cli.forecast.bandwidth import (
    FITTED,
    HONEST,
    BandwidthRow,
    Exchange,
    data_parallel_gbps,
    decoupled_gbps,
    max_busy_s,
    ring_factor,
    rows_of,
)


@cache
def published_rows() -> list[BandwidthRow]:
    return bandwidth.published_rows()


def test_the_published_data_parallel_rows_are_met_within_five_percent() -> None:
    rows = [row for row in published_rows() if row.method == "data_parallel" and row.utilisation_percent <= 95]
    assert len(rows) == 16
    for row in rows:
        assert row.gbps == pytest.approx(row.published_gbps, rel=0.05), row


def test_the_published_decoupled_rows_are_met_within_ten_percent_by_the_setting_that_is_named() -> None:
    rows = [row for row in published_rows() if row.method == "decoupled" and row.published_gbps is not None]
    assert len(rows) == 40 and {(row.sync_every, row.fragments, row.overlap) for row in rows} == {(100, 18, 2)}
    for row in rows:
        assert row.gbps == pytest.approx(row.published_gbps, rel=0.10), row


def test_the_named_setting_needs_more_and_stands_beside_it_without_a_published_figure() -> None:
    """A fragment a step keeps the link busy all the time: it carries 5e9 x bits x 2 (D - 1) / D in 24 steps and their
    stalls."""
    rows = [row for row in published_rows() if row.sync_every == 24]
    assert len(rows) == 40 and all(row.published_gbps is None for row in rows)
    for row in rows:
        bits = {"bf16": 16, "int4": 4}[row.codec]
        bound = 5 * bits * ring_factor(row.sites) * row.utilisation_percent / 100 / (24 * row.step_s)
        assert row.gbps == pytest.approx(bound, rel=1e-9), row


def test_a_step_of_data_parallel_by_hand() -> None:
    """Half utilisation: 2 s for a step of 1 s. The first of 44 buckets is ready at 1/3 + 2/3/44 s; from then on the
    link is busy with all 80 Gbit: 80 / (2 - 0.348485) = 48.44. At 99 % the last bucket alone has 1/99 s."""
    assert data_parallel_gbps(80e9, 2, 1.0, 0.5) == pytest.approx(80 / (2 - (1 / 3 + 2 / 3 / 44)), rel=1e-6)
    assert data_parallel_gbps(80e9, 2, 1.0, 0.99) == pytest.approx(80 / 44 * 99, rel=1e-6)


def test_one_fragment_by_hand() -> None:
    """One fragment of 10 bits in rounds of 5 steps of 1 s, needed 2 steps later: at 2 bit/s it takes 5 s, 3 s too many;
    a round lasts 8 s. At 5 bit/s it arrives in time."""
    once = Exchange(sync_every=5, fragments=1, overlap=2)
    assert decoupled_gbps(10e9, 1.0, once, 5 / 8) == pytest.approx(2.0, rel=1e-6)
    assert decoupled_gbps(10e9, 1.0, once, 0.999999) == pytest.approx(5.0, rel=1e-4)


def test_more_of_anything_needed_means_more_bandwidth() -> None:
    base = decoupled_gbps(80e9, 1.0, HONEST, 0.9)
    assert decoupled_gbps(80e9, 0.5, HONEST, 0.9) == pytest.approx(2 * base, rel=1e-6)
    assert decoupled_gbps(80e9, 1.0, FITTED, 0.9) < base < decoupled_gbps(80e9, 1.0, HONEST, 0.95)
    assert ring_factor(2) == 1.0 and ring_factor(8) == 1.75
    rows = rows_of(1e9, 4, 1.0, HONEST, {"bf16": 16.0, "int8": 8.125})
    bf16 = [row.gbps for row in rows if row.codec == "bf16" and row.method == "decoupled"]
    int8 = [row.gbps for row in rows if row.codec == "int8"]
    assert bf16 == sorted(bf16) and all(a > b for a, b in zip(bf16, int8, strict=True))


EXCHANGES = st.builds(
    Exchange,
    sync_every=st.integers(1, 40),
    fragments=st.integers(1, 40),
    overlap=st.integers(0, 39),
).filter(lambda exchange: exchange.overlap < exchange.sync_every)
UTILISATION = st.floats(0.05, 0.995)


@settings(max_examples=300)
@given(exchange=EXCHANGES, utilisation=UTILISATION)
def test_a_link_carries_in_a_round_what_a_round_sends(exchange: Exchange, utilisation: float) -> None:
    bound = utilisation * 80 / (exchange.sync_every * 0.7)
    assert decoupled_gbps(80e9, 0.7, exchange, utilisation) >= bound * (1 - 1e-9)


@pytest.mark.parametrize("overlap", [2, 10, 20, 23])
def test_a_large_overlap_needs_what_a_round_sends_and_no_less(overlap: int) -> None:
    """1e9 parameters of 4.25 bits, in 24 steps of 1 s, at 99 %."""
    assert decoupled_gbps(4.25e9, 1.0, Exchange(24, 24, overlap), 0.99) == pytest.approx(0.99 * 4.25 / 24, rel=1e-9)


def rounds_end_at(exchange: Exchange, step_s: float, busy_s: float, rounds: int) -> list[float]:
    """Step by step and from an empty link, each step as soon as it can: when each round ends."""
    offsets = [max(1, round((p + 1) * exchange.sync_every / exchange.fragments)) for p in range(exchange.fragments)]
    free_s, needed, now_s, ends = 0.0, dict[int, float](), 0.0, []
    for step in range(rounds * exchange.sync_every):
        now_s = max(now_s, needed.pop(step, 0.0)) + step_s
        for offset in offsets:
            if offset != step % exchange.sync_every + 1:
                continue
            free_s = max(free_s, now_s) + busy_s / exchange.fragments
            back = step + exchange.overlap + 1
            needed[back] = max(needed.get(back, 0.0), free_s)
        if (step + 1) % exchange.sync_every == 0:
            ends.append(now_s)
    return ends


@settings(max_examples=60)
@given(exchange=EXCHANGES, utilisation=st.floats(0.2, 0.95))
def test_steps_that_follow_each_other_reach_that_utilisation_and_with_less_they_do_not(
    exchange: Exchange, utilisation: float
) -> None:
    busy_s = max_busy_s(1.0, exchange, utilisation)
    round_s = exchange.sync_every / utilisation
    ends = rounds_end_at(exchange, 1.0, busy_s, 100)
    assert ends[-1] - ends[49] <= 50 * round_s * (1 + 1e-6) + 1e-6
    slower = rounds_end_at(exchange, 1.0, busy_s * 1.02, 200)
    assert slower[-1] - slower[99] > 100 * round_s
