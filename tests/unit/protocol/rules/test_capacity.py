"""How large a run one syncer carries: by hand, and against the product's syncer in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from diloco_cli.protocol.rules.capacity import (
    Limit,
    MergeWork,
    SlotTime,
    SyncerMachine,
    calls_of_merge,
    measured_machine,
    merge_time,
    most_learners,
    shortest_slot,
    turns,
)
from tests.benchmarks.pace import Syncing, served_every

WORK = MergeWork(learners=8, parameters=1e6, delta_bytes=2e6, version_bytes=1e7)
FAR = SyncerMachine(0.04, 1e9, 2e9, 1e9)


def test_a_merge_is_its_calls_its_bytes_and_its_processor_one_after_the_other() -> None:
    spent = merge_time(WORK, FAR)
    assert spent.calls_s == pytest.approx(5 * 0.04)
    assert spent.bytes_s == pytest.approx(8 * (8 * 2e6 + 1e7) / 2e9 + 8 * 1e7 / 1e9)
    assert spent.processor_s == pytest.approx(8 * 1e6 / 1e9)
    assert spent.limit == "calls" and spent.seconds == pytest.approx(0.2 + 0.104 + 0.08 + 0.008)


def test_learners_calls_go_together_up_to_the_number_of_connections() -> None:
    assert [calls_of_merge(learners, FAR) for learners in (1, 48, 49, 96, 97)] == [5, 6, 8, 9, 11]
    assert [turns(calls, 48) for calls in (0, 1, 48, 49, 96, 97)] == [0, 1, 1, 2, 2, 3]


def test_fewer_connections_take_more_calls_in_turn() -> None:
    """Of 8 learners on 5: 2 for their offers, 4 for payloads and looks, then state and weights at once, twice, and the
    commit. On one connection each call is in turn. Sets of more than 48 calls go in portions, whose last connections
    may stay idle: 96 calls on 5 are twice 10."""
    few = replace(FAR, connections=5, call_s=1.0)
    assert calls_of_merge(8, few) == 2 + 4 + 1 + 1 + 1
    assert calls_of_merge(8, replace(few, connections=1)) == 8 + 16 + 2 + 2 + 1
    assert calls_of_merge(8, replace(few, connections=1, reads_back=False)) == 8 + 16 + 2 + 1
    assert [turns(96, connections) for connections in (1, 5, 32, 48)] == [96, 20, 4, 2], "in portions of 48"
    assert merge_time(WORK, few).calls_s == 9.0
    bare = SyncerMachine(1.0, None, None, 1e30, connections=1)
    assert shortest_slot(WORK, bare, 0.1).seconds == 29 + 2 + 8 + 1, "the look for incarnations as well"


def test_what_a_store_has_checked_is_not_read_back() -> None:
    back, not_back = merge_time(WORK, FAR), merge_time(WORK, replace(FAR, reads_back=False))
    assert back.calls_s - not_back.calls_s == pytest.approx(0.04)
    assert back.bytes_s - not_back.bytes_s == pytest.approx(8 * 1e7 / 2e9)


@pytest.mark.parametrize(
    ("machine", "limit"),
    [
        (replace(FAR, call_s=1.0), "calls"),
        (replace(FAR, up_bps=1e8, call_s=0.001), "bytes"),
        (replace(FAR, parameters_per_s=1e6), "processor"),
    ],
)
def test_what_takes_most_of_a_slot_is_the_limit(machine: SyncerMachine, limit: Limit) -> None:
    assert shortest_slot(WORK, machine, 1.0).limit == limit


def test_calls_made_now_and_then_count_once_a_turn_at_most() -> None:
    """Turns of 0.05 s: 2 calls for requests and one for incarnations in each 20th, after a second; a heartbeat in each
    59th. In turns of 0.6 s the former come in each second one. In turns of more than three seconds all come in each."""
    bare = SyncerMachine(0.01, None, None, 1e30)
    short = shortest_slot(WORK, bare, 0.1).seconds
    assert short == pytest.approx(0.05 + 0.01 * (3 / 20 + 1 / 59))
    assert shortest_slot(WORK, replace(bare, call_s=0.12), 0.1).seconds == pytest.approx(0.6 + 0.12 * (3 / 2 + 1 / 4))
    assert shortest_slot(WORK, replace(bare, call_s=1.0), 0.1).seconds == pytest.approx(5 + 2 + 1 + 1)


def test_the_largest_number_of_learners_is_the_last_that_keeps_to_the_slot() -> None:
    for slot_s in (0.4, 1.0, 5.0):
        most = most_learners(WORK, FAR, slot_s)
        assert shortest_slot(replace(WORK, learners=most), FAR, slot_s).seconds <= slot_s
        assert shortest_slot(replace(WORK, learners=most + 1), FAR, slot_s).seconds > slot_s
    assert most_learners(WORK, FAR, 0.1) == 0


def test_more_learners_never_take_less() -> None:
    found = [shortest_slot(replace(WORK, learners=n), FAR, 1.0).seconds for n in range(1, 200)]
    assert all(fewer < more for fewer, more in pairwise(found))


def test_what_a_syncer_measures_gives_the_same_slot() -> None:
    few = replace(FAR, connections=3)
    spent = merge_time(WORK, few)
    measured = measured_machine(WORK, few.call_s, spent.bytes_s, spent.processor_s, few.reads_back, few.connections)
    found, expected = shortest_slot(WORK, measured, 0.5), shortest_slot(WORK, few, 0.5)
    assert (found.calls_s, found.bytes_s) == pytest.approx((expected.calls_s, expected.bytes_s))
    assert found.processor_s == pytest.approx(expected.processor_s)
    light = merge_time(WORK, measured_machine(WORK, 0.04, 0.0, 0.0, True, 48))
    assert (light.bytes_s, light.processor_s) == (0.0, 0.0)
    assert SlotTime(0.1, 0.3, 0.2).limit == "bytes"


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        (Syncing(8, 1.0, 0.04), None),
        (Syncing(8, 0.2, 0.04), "calls"),
        (Syncing(4, 0.25, 0.16), "calls"),
        (Syncing(3, 0.355, 0.1), "calls"),
        (Syncing(8, 0.2, 0.4), "calls"),
        (Syncing(8, 0.2, 0.1, reads_back=False), "calls"),
        (Syncing(8, 0.2, 0.04, connections=5), "calls"),
        (Syncing(8, 1.0, 0.01, connections=2), None),
        (Syncing(8, 0.2, 0.04, connections=1), "calls"),
        (Syncing(6, 0.2, 0.04, connections=1, reads_back=False), "calls"),
        pytest.param(Syncing(60, 0.3, 0.04), "calls", marks=pytest.mark.long),
        (Syncing(4, 0.2, 0.005, delta_bytes=2e7, version_bytes=1e8, bps=4e9), "bytes"),
        (Syncing(4, 0.2, 0.005, merge_s=0.5), "processor"),
    ],
)
def test_the_products_syncer_merges_at_the_pace_of_the_model(case: Syncing, limit: Limit | None) -> None:
    """Within 15 %: at every slot where it holds that, and as often as the model says where it does not, up to 18 times
    as slow as the slots."""
    spent = shortest_slot(case.work, case.machine, case.slot_s)
    assert (spent.limit if spent.seconds > case.slot_s else None) == limit
    assert served_every(case) == pytest.approx(max(case.slot_s, spent.seconds), rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("case", [Syncing(60, 0.3, 0.04, connections=47), Syncing(50, 0.3, 0.04, connections=25)])
def test_connections_that_divide_no_portion_are_a_wider_case(case: Syncing) -> None:
    """The model is up to 22 % slower than the syncer, whose portions mix calls of both stages."""
    model_s = shortest_slot(case.work, case.machine, case.slot_s).seconds
    assert model_s / 1.22 <= served_every(case) <= model_s
