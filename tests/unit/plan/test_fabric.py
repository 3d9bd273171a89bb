"""What joins an island's ranks: their sums and copies beside their computing; what counts where nothing is said."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators, Fabric, find_device
from diloco_cli.config.models import facts_from_numbers
from diloco_cli.config.settings import Inventory, IslandSettings, MachineSettings, RunSettings
from diloco_cli.plan.candidates import Candidate, candidates
from diloco_cli.plan.fabric import REACHED, ring_of
from diloco_cli.plan.islands import Machine, island_of
from diloco_cli.plan.planner import explain, make_plan
from tests.unit.plan.fleets import IOWA, MODEL, OLD, RUN, fleet

LARGE = facts_from_numbers(8_030_261_248, 32, 4096, 2048)
NODE = replace(IOWA, mfu=None, batch_tokens=8 * 4 * 2048)


def cluster(nodes: int, sequences_a_rank: int = 1, fabric: Fabric | None = None) -> IslandSettings:
    batch = nodes * 8 * sequences_a_rank * 2048
    return replace(NODE, infra="slurm/p", nodes=nodes, fabric=fabric, batch_tokens=batch)


def planned(island: IslandSettings, run: RunSettings = RUN, model: object = MODEL) -> Candidate:
    (found,) = candidates(run, fleet(island), model)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("island", [NODE, IOWA, OLD, replace(NODE, accelerators=Accelerators("RTX-4090", 2))])
def test_a_node_of_which_no_fabric_is_given_is_planned_as_before(island: IslandSettings) -> None:
    found = planned(island)
    assert (found.ring, found.beside_fabric) == (None, 1.0)


def test_thousands_of_copies_on_ethernet_are_far_from_full_speed_and_the_plan_says_so() -> None:
    usual, ethernet = planned(cluster(1000)), planned(cluster(1000, fabric=Fabric("ethernet")))
    assert usual.fit.sharding == "ddp" and usual.beside_fabric == 1.0
    assert ethernet.beside_fabric < 0.2
    assert ethernet.tokens_per_s == pytest.approx(usual.tokens_per_s * ethernet.beside_fabric)
    plan = make_plan(RUN, fleet(cluster(1000, fabric=Fabric("ethernet"))), MODEL)
    assert any(
        "ranks wait for each other" in warning and "Ethernet of 100 Gbps" in warning for warning in plan.warnings
    )


def test_copies_sum_once_a_step_and_larger_batches_hide_it() -> None:
    """The last pass of a step has something to hide behind, the others are not held up."""
    left = [planned(cluster(4, sequences, Fabric("ethernet"))).beside_fabric for sequences in (1, 4, 16, 64)]
    assert left == sorted(left) and left[0] < 0.1 and left[-1] > 0.75
    found = planned(cluster(4, 1, Fabric("ethernet")))
    compute_s = found.step_s * found.beside_fabric
    all_reduce_s = 2 * 31 / 32 * MODEL.parameters * 32 / (REACHED * 100e9)
    assert found.step_s == pytest.approx(compute_s / 3 + all_reduce_s)  # all that is after the forward pass


def test_shards_are_gathered_twice_and_summed_once_in_each_pass() -> None:
    sharded = replace(RUN, train=replace(RUN.train, sharding="fsdp", micro_batch_tokens=2048))
    once, twice = (planned(cluster(4, n, Fabric(gbps=1.0)), sharded, LARGE) for n in (1, 2))
    assert once.fit.sharding == "fsdp"
    gathered_s = 31 / 32 * LARGE.parameters * 16 / (REACHED * 1e9)
    assert once.step_s == pytest.approx(2 * gathered_s + 2 * gathered_s)  # float32 sums are twice as large
    assert twice.step_s == pytest.approx(2 * once.step_s)


def test_a_faster_fabric_is_never_slower_and_kinds_have_the_rates_of_the_device() -> None:
    rates = [planned(cluster(64, fabric=Fabric(gbps=gbps))).tokens_per_s for gbps in (1, 10, 100, 1e3, 1e5)]
    assert rates == sorted(rates)
    h100, a100 = (find_device(name, {}) for name in ("H100-SXM", "A100-80GB-SXM"))
    assert [Fabric("nvlink").rate_gbps(d) for d in (h100, a100)] == [3600, 2400]
    assert [Fabric("pcie").rate_gbps(d) for d in (h100, a100)] == [504, 252]
    assert Fabric("nvlink").rate_gbps(find_device("L40S", {})) is None


def test_between_nodes_a_device_has_its_usual_network_unless_the_speed_is_given() -> None:
    def ring(name: str, **more: object) -> object:
        found = ring_of(replace(cluster(2), accelerators=Accelerators(name, 8), **more), find_device(name, {}))
        return found and found.gbps

    assert (ring("H100-SXM"), ring("A100-40GB"), ring("MI300X"), ring("RTX-4090")) == (3200, 1600, 3200, 100)
    assert ring("TPU-v5e") is ring("cpu") is None
    assert ring("H100-SXM", mfu=0.4) is ring("H100-SXM", tokens_per_s=1e6) is None
    assert ring("H100-SXM", mfu=0.4, fabric=Fabric(gbps=50.0)) == 50
    assert ring("H100-SXM", tokens_per_s=1e6, fabric=Fabric(gbps=50.0)) is None  # measured with it
    within_a_node = (("H100-SXM", "nvlink", 3200), ("A40", "nvlink", 100), ("RTX-4090", "pcie", 100))
    assert all(ring(name, fabric=Fabric(kind)) == gbps for name, kind, gbps in within_a_node)


@pytest.mark.parametrize(("name", "kind"), [("ethernet", "ethernet"), ("pod-a", None)])
def test_machines_whose_fabric_is_called_as_a_kind_are_joined_by_it(name: str, kind: str | None) -> None:
    entry = MachineSettings("here", Accelerators("H100-SXM", 8), hosts=("a", "b"), nodes=2, fabric=name)
    fabric = island_of("pod", [Machine("a", entry), Machine("b", entry)]).fabric
    assert (fabric and fabric.kind) == kind


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_it_is_explained(sharding: str) -> None:
    run = replace(RUN, train=replace(RUN.train, sharding=sharding))
    inventory: Inventory = fleet(cluster(64, fabric=Fabric("ethernet")))
    plan = make_plan(run, inventory, MODEL)
    told = {item.name: item for item in explain(plan) if item.of == NODE.name}
    assert told["left beside the fabric"].value < 1
    summed = "summed on all ranks (all-reduce)" if sharding == "ddp" else "summed into shards (reduce-scatter)"
    assert told[f"gradients {summed}"].value > 0
    assert told["tokens/s"].formula.endswith("left beside fabric")
    assert any("Ethernet of 100 Gbps, leaves" in each.text for each in plan.assumptions)
