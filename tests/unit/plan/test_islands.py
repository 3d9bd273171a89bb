"""Raw machines become islands: each machine in exactly one place, and the reason told."""

from __future__ import annotations

from pathlib import Path
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators, find_device
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.models import facts_from_numbers
from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import (
    Inventory,
    IslandSettings,
    Link,
    MachineSettings,
    RunSettings,
    StoreSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.plan.islands import Forming, form_islands
from diloco_cli.plan.memory import Computing, memory_fit, model_facts

SMALL = facts_from_numbers(1_000_000_000, 16, 2048, 2048)  # 16 GB of state: fits a card of 24 GB
HOW = Computing(num_fragments=24, overlap=1)
LARGE = facts_from_numbers(6_700_000_000, 32, 4096, 2048)  # 107 GB of state: fits no one card
FORMING_RUN = RunSettings("test", train=TrainSettings(batch_tokens=524_288), sync=SyncSettings(every=100))
HOUR_S, MINUTE_S = 3600.0, 60.0
H100 = Accelerators("H100-SXM", 8)


def machines(hosts: str, fabric: str | None = "pod", accelerators: Accelerators = H100, **more) -> MachineSettings:
    return MachineSettings("here", accelerators, hosts=tuple(hosts.split()), fabric=fabric, infra="ssh", **more)


def formed(*entries: MachineSettings, model=SMALL, run=FORMING_RUN, islands=()) -> Forming:
    return form_islands(run, Inventory(StoreSettings("gs://bucket"), tuple(islands), machines=tuple(entries)), model)


def hosts_of(forming: Forming) -> list[tuple[str, ...]]:
    return [island.hosts for island in forming.inventory.islands]


def test_machines_of_one_fabric_are_one_island_whose_rates_and_prices_add_up():
    (island,) = formed(
        machines("a b c", mtbf_s=30 * 24 * HOUR_S, restart_s=240.0, price_per_h=12.0, mfu=0.4),
        machines("d", mtbf_s=15 * 24 * HOUR_S, restart_s=600.0, price_per_h=14.0, mfu=0.42),
    ).inventory.islands
    assert (island.name, island.hosts, island.nodes, island.accelerators) == ("pod", ("d", "a", "b", "c"), 4, H100)
    assert island.mtbf_s == pytest.approx(6 * 24 * HOUR_S)  # 3/30 + 1/15 = 1/6 failures a day
    assert (island.restart_s, island.price_per_h, island.mfu) == (600.0, 50.0, 0.4)


def test_a_machine_without_a_fabric_is_an_island_of_its_own():
    made = formed(machines("me@Box_1.lan box2", fabric=None))
    assert [island.name for island in made.inventory.islands] == ["box-1-lan", "box2"]
    assert "no fabric joins it to others" in made.formed[0].reason


def test_different_kinds_in_one_fabric_are_islands_of_their_own():
    made = formed(machines("a b"), machines("c", accelerators=Accelerators("A100-80GB-SXM", 8)))
    assert [(i.name, i.hosts) for i in made.inventory.islands] == [
        ("pod-h100-sxm", ("a", "b")),
        ("pod-a100-80gb-sxm", ("c",)),
    ]
    assert "pod holds 2 kinds of machines" in made.formed[1].reason


def test_machines_much_slower_than_the_fastest_stay_apart_and_those_nearly_as_fast_join():
    """0.91 of the fastest joins, 0.89 does not; the island goes at its slowest's pace."""
    made = formed(*(machines(host, tokens_per_s=speed) for host, speed in zip("abc", (100.0, 91.0, 89.0), strict=True)))
    assert [(i.name, i.hosts) for i in made.inventory.islands] == [("pod-1", ("a", "b")), ("pod-2", ("c",))]
    assert [island.tokens_per_s for island in made.inventory.islands] == [182.0, 89.0]
    assert "pace differs by more than 10 %" in made.formed[0].reason


def test_speeds_that_are_stated_in_different_ways_are_not_compared():
    made = formed(machines("a", mfu=0.4), machines("b"), machines("c", tokens_per_s=9e9), machines("d", mfu=0.38))
    assert hosts_of(made) == [("a", "d"), ("b",), ("c",)]


def test_a_group_that_fails_too_often_together_is_split_into_equal_parts():
    """n machines of 6 h MTBF and 4 min restart are available 360 / (360 + 4 n): 0.957 for 4, 0.947 for 5."""
    made = formed(machines("a b c d e f g h i j", mtbf_s=6 * HOUR_S, restart_s=4 * MINUTE_S))
    assert [(i.name, i.nodes) for i in made.inventory.islands] == [("pod-1", 4), ("pod-2", 3), ("pod-3", 3)]
    assert "failing together, all 10 would be available 90 % of the time" in made.formed[0].reason


def test_a_batch_with_few_sequences_splits_a_large_group():
    """65,536 tokens are 32 sequences of 2,048: at most four machines of eight accelerators have work."""
    run = replace(FORMING_RUN, train=TrainSettings(batch_tokens=65_536))
    made = formed(machines("a b c d e f g h"), run=run)
    assert hosts_of(made) == [("a", "b", "c", "d"), ("e", "f", "g", "h")]
    assert "too few sequences" in made.formed[0].reason


def test_a_split_stops_where_the_parts_would_no_longer_hold_the_model():
    fragile = {"mtbf_s": 45 * MINUTE_S, "restart_s": 5 * MINUTE_S}  # alone 0.9 available: split into single machines
    cards = {"accelerators": Accelerators("A100-40GB", 1)}
    assert [i.nodes for i in formed(machines("a b c d", **fragile, **cards)).inventory.islands] == [1, 1, 1, 1]
    hosts = " ".join(f"n{number}" for number in range(32))
    made = formed(machines(hosts, **fragile, **cards), model=LARGE)
    least = next(n for n in range(1, 33) if memory_fit(LARGE, HOW, n, 40.0).fits)
    assert 2 <= least <= 16, "the example must leave room for a split that is not into single machines"
    assert min(i.nodes for i in made.inventory.islands) >= least and len(made.inventory.islands) == 32 // least
    assert f"but {least} are needed to hold the model" in made.formed[0].reason


def test_a_group_is_not_split_into_islands_whose_links_could_not_carry_their_rounds():
    fragile = {"mtbf_s": 6 * HOUR_S, "restart_s": 4 * MINUTE_S}
    wide, narrow = (Link(up_bps=bps, down_bps=bps) for bps in (2e9, 10e6))
    assert len(formed(machines("a b c d e f g h", link=wide, **fragile)).inventory.islands) == 2
    made = formed(machines("a b c d e f g h", link=narrow, **fragile))
    assert len(made.inventory.islands) == 1
    assert "the links of smaller islands would not carry their rounds" in made.formed[0].reason


def test_the_machine_with_the_fastest_link_speaks_for_its_island():
    links = (Link(1e8, 1e8), Link(1e9, 1e9), Link(1e7, 1e9))
    made = formed(*(machines(host, link=link) for host, link in zip("abc", links, strict=True)))
    (island,) = made.inventory.islands
    assert (island.hosts, island.link) == (("b", "a", "c"), links[1])


def test_machines_that_cannot_hold_the_model_are_left_out_with_what_would_help():
    alone = machines("box7 box8", fabric=None, accelerators=Accelerators("RTX-4090", 2))
    made = formed(alone, machines("a"), model=LARGE)
    assert [item.name for item in made.excluded] == ["box[7-8]"]
    assert "does not fit 2 x RTX-4090 (24 GB each, no fabric to other machines)" in made.excluded[0].reason
    assert "such machines in one fabric" in made.excluded[0].suggestions[0]
    assert hosts_of(made) == [("a",)]


def test_machines_that_a_scheduler_picks_have_numbers_instead_of_names():
    rack = MachineSettings("here", H100, name="rack", nodes=3, fabric="ib0", infra="slurm/h100")
    made = formed(rack)
    (island,) = made.inventory.islands
    assert (island.name, island.hosts, island.nodes) == ("ib0", (), 3)
    assert made.formed[0].machines == ("rack/1", "rack/2", "rack/3")


def test_given_islands_come_first_and_keep_their_names():
    given = IslandSettings("pod", "here", H100)
    made = formed(machines("a"), machines("syncer", fabric=None), islands=[given])
    assert [island.name for island in made.inventory.islands] == ["pod", "pod-2", "syncer-2"]
    assert made.inventory.islands[0] == given and not made.inventory.machines


def test_an_inventory_of_islands_is_left_as_it_is():
    inventory = Inventory(StoreSettings("gs://bucket"), (IslandSettings("a", "here", H100),))
    assert form_islands(FORMING_RUN, inventory, SMALL) == Forming(inventory, (), ())


KINDS = st.sampled_from([H100, Accelerators("RTX-4090", 1), Accelerators("T4", 4), Accelerators("cpu", 2)])
ENTRIES = st.lists(
    st.tuples(
        st.sampled_from([None, "p", "q"]),
        KINDS,
        st.integers(1, 6),
        st.sampled_from([None, 0.5, 6.0, 700.0]),
        st.sampled_from([None, 50.0, 94.0, 100.0]),
        st.sampled_from([None, 1e7, 2e9]),
        st.sampled_from(["ssh", "slurm/a"]),
    ),
    min_size=1,
    max_size=8,
)


def _entry(index: int, drawn: tuple) -> MachineSettings:
    fabric, kind, count, mtbf_h, speed, bps, infra = drawn
    own = {"name": f"rack{index}", "nodes": count} if infra != "ssh" else {}
    return MachineSettings(
        "here", kind, fabric=fabric, infra=infra, link=Link(bps, bps), tokens_per_s=speed, price_per_h=1.5,
        hosts=() if own else tuple(f"n{index}-{number}" for number in range(count)),
        mtbf_s=None if mtbf_h is None else mtbf_h * HOUR_S, **own,
    )  # fmt: skip


@settings(max_examples=60)
@given(drawn=ENTRIES, large=st.booleans())
def test_islands_partition_the_machines(drawn, large):
    """Every machine is in one island or left out, never both; an island has one kind, one fabric, and holds the
    model; nothing is lost on the way: counts and prices add up."""
    entries = [_entry(index, item) for index, item in enumerate(drawn)]
    everyone = {
        name: entry
        for index, entry in enumerate(entries)
        for name in entry.hosts
        or ([f"rack{index}"] if entry.nodes == 1 else [f"rack{index}/{n}" for n in range(1, entry.nodes + 1)])
    }
    model = LARGE if large else SMALL
    made = formed(*entries, model=model)
    used = [name for item in made.formed for name in item.machines]
    assert len(used) == len(set(used)) and set(used) <= set(everyone)
    num_left_out = sum(e.nodes if not e.hosts else len(e.hosts) for e in entries) - len(used)
    assert (num_left_out > 0) == bool(made.excluded)
    assert [item.name for item in made.formed] == [island.name for island in made.inventory.islands]
    for item, each in zip(made.formed, made.inventory.islands, strict=True):
        members = [everyone[name] for name in item.machines]
        assert {(m.accelerators, m.fabric, m.infra) for m in members} == {
            (each.accelerators, members[0].fabric, each.infra)
        }
        assert len(members) == each.nodes and (members[0].fabric is not None or each.nodes == 1)
        assert sorted(each.hosts) == (sorted(item.machines) if members[0].hosts else [])
        memory_gb = find_device(each.accelerators.name, {}).memory_gb
        assert memory_fit(model, HOW, each.nodes * each.accelerators.count, memory_gb).fits
        assert each.price_per_h == pytest.approx(1.5 * each.nodes)
        assert item.reason
    assert len({island.name for island in made.inventory.islands}) == len(made.inventory.islands)


def test_machines_are_grouped_the_same_way_however_they_are_listed():
    """One entry of four hosts, or four entries of one."""
    more = {"mtbf_s": 6 * HOUR_S, "restart_s": 4 * MINUTE_S}
    together = formed(machines("a b c d e f", **more))
    apart = formed(*(machines(host, **more) for host in "abcdef"))
    assert together == apart


def test_the_example_of_64_machines_in_five_regions_is_formed_as_its_readme_says():
    folder = Path(__file__).resolve().parents[3] / "examples" / "plan"
    run, inventory = load_run(folder / "machines-run.yaml"), load_inventory(folder / "machines.yaml")
    assert sum(entry.nodes for entry in inventory.machines) == 64
    assert len({entry.region for entry in inventory.machines}) == 5
    made = form_islands(run, inventory, model_facts(run.model))
    assert {item.name: len(item.machines) for item in made.formed} == {
        "iowa-ib-h100-sxm": 12, "iowa-ib-a100-80gb-sxm": 4, "west-efa-1": 4, "west-efa-2": 4, "west-efa-3": 4,
        "eu-rack-1": 8, "eu-rack-2-1": 7, "eu-rack-2-2": 1, "slice-1": 1, "slice-2": 1, "slice-3": 1, "slice-4": 1,
        "office-switch": 8,
    }  # fmt: skip
    assert [item.name for item in made.excluded] == ["home[1-4]", "old[1-4]"]  # 56 used and 8 left out


def test_ten_thousand_machines_are_formed_at_once():
    """0.3 to 0.5 s of one core."""
    listed = [machines(f"n{number}", fabric=f"pod{number // 100}" if number % 2 else None) for number in range(10_000)]
    started_s = process_time()
    made = formed(*listed)
    assert process_time() - started_s < 5.0
    assert sum(island.nodes for island in made.inventory.islands) == 10_000
