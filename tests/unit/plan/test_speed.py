"""Islands of one machine share its cores: expected shares by hand, and by a scheduler that is played step by step."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators
from diloco_cli.config.settings import Inventory, IslandSettings, LocalMachine, StoreSettings
from diloco_cli.plan.candidates import (
    MAX_SLEEPERS,
    busy_cores,
    contention,
    left,
    seat,
    share_of_cores,
    shares_of_the_local_machine,
    woken_threads,
)

ISLANDS = [
    IslandSettings("a", "here", Accelerators("cpu", 2)),
    IslandSettings("b", "here", Accelerators("cpu", 2), slowdown=2.0),
    IslandSettings("c", "there", Accelerators("cpu", 4)),
    IslandSettings("d", "here", Accelerators("H100-SXM", 8)),
    IslandSettings("e", "here", Accelerators("cpu", 64), infra="ssh"),
]


def core(name: str, slowdown: float = 1.0) -> IslandSettings:
    return IslandSettings(name, "here", Accelerators("cpu", 1), slowdown=slowdown)


def of_machine(local: LocalMachine, *islands: IslandSettings) -> dict[str, float]:
    return shares_of_the_local_machine(Inventory(StoreSettings("file:///x"), islands, local=local))


def test_only_local_cpu_islands_of_the_region_share_this_machines_cores():
    """On two cores: a and c are awake all the time, b half of it, so that 6 or 8 threads are awake; b's see 8."""
    assert busy_cores(ISLANDS, None) == 7.0
    assert busy_cores(ISLANDS, "here") == 3.0
    steady = (2 / 6 + 2 / 8) / 2
    shares = share_of_cores(ISLANDS, None, 2)
    assert shares == pytest.approx({"a": steady, "b": 0.25, "c": steady, "d": 1.0, "e": 1.0})
    shares = share_of_cores(ISLANDS, "here", 2)
    assert shares == pytest.approx({"a": (1 + 0.5) / 2, "b": 0.5, "c": 1.0, "d": 1.0, "e": 1.0})


def test_enough_cores_change_nothing():
    assert set(share_of_cores(ISLANDS, None, 8).values()) == {1.0}
    assert share_of_cores(ISLANDS, "nowhere", 1)["a"] == 1.0


def test_who_wakes_on_a_full_machine_shares_one_core_with_one_other():
    """Two that never sleep on two cores, and one that sleeps half the time: while it is awake it gets half of a core,
    and not 2 / 3; the others together the rest. The run's services take 0.2 of the two cores from everybody."""
    shares = of_machine(LocalMachine(2), core("a"), core("b"), core("z", slowdown=2.0))
    assert shares == pytest.approx({"a": 0.9 * (1 + 0.75) / 2, "b": 0.9 * (1 + 0.75) / 2, "z": 0.9 / 2})


def test_what_a_crowd_costs_is_as_measured():
    local = LocalMachine(2, (1.0, 0.9, 0.6))  # the even share of 3 is 2 / 3: one in ten is lost to the crowd
    shares = of_machine(local, core("a"), core("b"), core("z", slowdown=2.0))
    assert shares["z"] == pytest.approx(0.9 * 0.6 * 3 / 4)
    assert shares["a"] == pytest.approx(0.9 * (0.9 + 0.6 * 9 / 8) / 2)


@given(
    cores=st.integers(1, 6),
    steady=st.integers(0, 8),
    sleepers=st.integers(0, 6),
)
def test_awake_threads_use_every_core_and_no_more(cores, steady, sleepers):
    awake = steady + sleepers
    if awake == 0:
        return
    even = min(1.0, cores / awake)
    used = steady * seat(awake, sleepers, cores, False) + sleepers * seat(awake, sleepers, cores, True)
    assert used * even == pytest.approx(min(awake, cores))


@pytest.mark.parametrize(("cores", "steady"), [(2, 2), (2, 3), (2, 4), (3, 4), (4, 5)])
def test_seats_are_those_of_a_scheduler_that_puts_the_last_one_where_there_is_most_room(cores, steady):
    """Exact fractions: threads are dealt out one after the other, the sleeper last."""
    on_core = [0] * cores
    for _ in range(steady + 1):
        emptiest = min(range(cores), key=lambda c: on_core[c])
        on_core[emptiest] += 1
    last = Fraction(1, on_core[emptiest])
    even = Fraction(cores, steady + 1)
    assert seat(steady + 1, 1, cores, True) * even == pytest.approx(float(last))


@pytest.mark.parametrize(
    ("cores", "crowding", "awake", "share"),
    [
        (2, (), 1, 1.0),
        (2, (), 4, 0.5),  # nothing measured: the cores are divided
        (2, (1.0, 0.9, 0.6), 1, 1.0),
        (2, (1.0, 0.9, 0.6), 2, 0.9),
        (2, (1.0, 0.9, 0.6), 6, 0.3),  # twice as many as were measured
        (8, (1.0, 0.9), 4, 0.9),  # cores enough for all: no worse than what was measured
    ],
)
def test_the_share_in_a_crowd(cores, crowding, awake, share):
    assert contention(LocalMachine(cores, crowding), awake) == pytest.approx(share)


def test_services_take_idle_cores_first():
    assert left(1, 2, 0.2) == 1.0
    assert left(2, 2, 0.2) == pytest.approx(0.9)
    assert left(5, 2, 0.2) == pytest.approx(0.9)
    assert left(1, 1, 0.2) == pytest.approx(0.8)


def test_only_local_cores_share_and_only_where_the_inventory_knows_the_machine():
    inventory = Inventory(StoreSettings("file:///x"), tuple(ISLANDS))
    assert shares_of_the_local_machine(inventory) == {}
    known = shares_of_the_local_machine(replace(inventory, local=LocalMachine(2)))
    assert known == pytest.approx({"a": 0.9 * 7 / 24, "b": 0.9 / 4, "c": 0.9 * 7 / 24})


def test_probabilities_of_a_view_add_up_and_very_many_sleepers_are_taken_at_their_mean():
    few = list(woken_threads([core(f"n{i}", slowdown=4.0) for i in range(8)]))
    assert sum(probability for probability, _ in few) == pytest.approx(1.0)
    assert sum(probability * awake for probability, awake in few) == pytest.approx(8 / 4)
    many = [core(f"n{i}", slowdown=4.0) for i in range(4 * MAX_SLEEPERS)]
    assert list(woken_threads(many)) == [(1.0, MAX_SLEEPERS)]
