"""What cannot train is in no plan, with the way out; what launch cannot run, the plan says and launch
refuses. What joins an island's ranks: their sums and copies beside their computing; what counts where nothing is
said."""

from __future__ import annotations

from statistics import median

import pytest

from diloco_cli.cli.plan_view import answer
from diloco_cli.cli.preflight import refuse_unfit
from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators, Device, Fabric, find_device
from diloco_cli.config.models import facts_from_numbers
from diloco_cli.config.settings import (
    Inventory,
    IslandSettings,
    LocalMachine,
    MachineSettings,
    RunSettings,
    StoreSettings,
)
from diloco_cli.errors import InfeasibleError
from diloco_cli.launch.plan_files import islands_of
from diloco_cli.plan.candidates import (
    REACHED,
    Candidate,
    busy_cores,
    candidates,
    ring_of,
    share_of_cores,
    shared_cores,
    usual_mfu,
)
from diloco_cli.plan.islands import Machine, island_of
from diloco_cli.plan.planner import explain, make_plan
from tests.studies.speeds import close, compared, published
from tests.unit.plan.fleets import IOWA, MODEL, OLD, RUN, fleet, island

TPU = island("tpu", "TPU-v5e", 4)


@pytest.mark.parametrize(
    ("stuck", "reason", "way"),
    [
        (
            replace(IOWA, name="few", batch_tokens=4 * 2048),
            "a batch of 4 sequences cannot be divided over 8 ranks", "batch_tokens: 16384 or more",
        ),
        (
            island("macs", "mps", 1, nodes=2, tokens_per_s=9e4, batch=65_536),
            "2 ranks cannot work together on mps", "an island for each: accelerators: mps:1",
        ),
    ],
)  # fmt: skip
def test_ranks_that_cannot_work_together_are_infeasible(stuck: IslandSettings, reason: str, way: str) -> None:
    plan = make_plan(RUN, fleet(IOWA, stuck), MODEL)
    assert [i.name for i in plan.islands] == ["iowa"]
    (left,) = plan.excluded
    assert (left.reason, left.suggestions[0]) == (reason, way)
    with pytest.raises(InfeasibleError, match=reason):
        make_plan(RUN, fleet(stuck), MODEL)


@pytest.mark.parametrize(
    ("unfit", "why", "hint"),
    [
        (TPU, "learners do not train on torch's xla devices, only on cpu, cuda, mps", "leave it out"),
        (island("odd", "MyChip", 1), "what torch calls this device is not known", "{MyChip: {backend: cuda}}"),
        (replace(IOWA, nodes=2), "infra: local is one machine, not 2 nodes", "infra: ssh with hosts"),
    ],
)
def test_what_launch_cannot_run_is_planned_and_said_and_refused(unfit: IslandSettings, why: str, hint: str) -> None:
    devices = {"MyChip": Device("MyChip", memory_gb=80.0, bf16_tflops=100.0)}
    plan = make_plan(RUN, replace(fleet(OLD, unfit), devices=devices), MODEL)
    assert any(w.startswith(f"{unfit.name}: launch cannot run it: {why}") for w in plan.warnings)
    with pytest.raises(InfeasibleError, match=f"{unfit.name} .* cannot be launched: {why}") as caught:
        refuse_unfit(plan)
    assert hint in (caught.value.hint or "")
    refuse_unfit(make_plan(RUN, fleet(OLD), MODEL))


def test_a_device_of_ones_own_is_launched_as_what_torch_calls_it() -> None:
    devices = {"MyChip": Device("MyChip", memory_gb=80.0, bf16_tflops=100.0, backend="cuda")}
    plan = make_plan(RUN, replace(fleet(island("odd", "MyChip", 1)), devices=devices), MODEL)
    refuse_unfit(plan)
    (there,) = islands_of(plan, {"odd": 1.0})
    assert there.accelerator == "cuda"
    assert islands_of(make_plan(RUN, fleet(OLD), MODEL), {"old": 1.0})[0].accelerator == "V100-SXM2-16GB"


def test_checkpointing_takes_a_tenth_of_the_planned_speed_unless_that_was_measured() -> None:
    train = replace(RUN.train, checkpointing=True)
    slower = make_plan(replace(RUN, train=train), fleet(IOWA), MODEL).islands[0].tokens_per_s
    assert slower == pytest.approx(0.9 * make_plan(RUN, fleet(IOWA), MODEL).islands[0].tokens_per_s)
    measured = replace(IOWA, tokens_per_s=4e5)
    assert make_plan(replace(RUN, train=train), fleet(measured), MODEL).islands[0].tokens_per_s == 4e5


def test_a_model_that_fits_once_activations_are_computed_again_says_so() -> None:
    """38.9 GB for 1 B parameters and sequences of 8,192 on one card; a copy on each of 8 does not fit either."""
    long = replace(MODEL, sequence=8192)
    train = replace(RUN.train, sharding="ddp")
    card = island("card", "A100-40GB", 8, batch=8 * 8192)
    (left,) = make_plan(replace(RUN, train=train), fleet(IOWA, card), long).excluded
    assert "--set train.sharding=auto" in left.suggestions
    alone = island("alone", "A100-40GB", 1, batch=8 * 8192)
    (left,) = make_plan(RUN, fleet(IOWA, alone), long).excluded
    assert "--set train.checkpointing=true" in left.suggestions
    again = replace(RUN, train=replace(RUN.train, checkpointing=True))
    assert make_plan(again, fleet(IOWA, alone), long).excluded == ()


ISLANDS = [
    IslandSettings("a", "here", Accelerators("cpu", 2)),
    IslandSettings("b", "here", Accelerators("cpu", 2), slowdown=2.0),
    IslandSettings("c", "there", Accelerators("cpu", 4)),
    IslandSettings("d", "here", Accelerators("H100-SXM", 8)),
    IslandSettings("e", "here", Accelerators("cpu", 64), infra="ssh"),
]


def test_only_local_cpu_islands_of_the_region_share_this_machines_cores():
    """On two cores: a and c are awake all the time, b half of it: 7 threads in the mean, and 8 while b is awake."""
    assert busy_cores(ISLANDS, None) == 7.0
    assert busy_cores(ISLANDS, "here") == 3.0
    shares = share_of_cores(ISLANDS, None, LocalMachine(2))
    assert shares == pytest.approx({"a": 2 / 7, "b": 2 / 8, "c": 2 / 7, "d": 1.0, "e": 1.0})
    shares = share_of_cores(ISLANDS, "here", LocalMachine(2))
    assert shares == pytest.approx({"a": 2 / 3, "b": 2 / 4, "c": 1.0, "d": 1.0, "e": 1.0})


def test_enough_cores_change_nothing():
    assert set(share_of_cores(ISLANDS, None, LocalMachine(8)).values()) == {1.0}
    assert share_of_cores(ISLANDS, "nowhere", LocalMachine(1))["a"] == 1.0


def test_services_take_idle_cores_first():
    assert shared_cores(LocalMachine(2), 1, 0.2) == 1.0
    assert shared_cores(LocalMachine(2), 2, 0.2) == pytest.approx(0.9)
    assert shared_cores(LocalMachine(2), 5, 0.2) == pytest.approx(0.9 * 2 / 5)
    assert shared_cores(LocalMachine(1), 1, 0.2) == pytest.approx(0.8)


def test_speeds_are_shared_only_where_the_inventory_knows_the_machine():
    inventory = Inventory(StoreSettings("file:///x"), tuple(i for i in ISLANDS if i.name in "ac"))
    assert {c.share for c in candidates(RUN, inventory, MODEL)} == {1.0}
    known = candidates(RUN, replace(inventory, local=LocalMachine(2)), MODEL)
    assert [c.share for c in known] == pytest.approx([0.9 * 2 / 6] * 2)


def test_speeds_that_nobody_measured_are_those_of_public_runs() -> None:
    """Of the third that the catalogue was not made of; and the catalogue has the median of the others."""
    rows = compared(published())
    held_out = [row for row in rows if not row.run.fitted]
    assert len(held_out) >= 10 and close(held_out) >= 0.8
    assert all(row.fits for row in held_out)
    assert [row.run.parameters for row in rows if not row.fits] == [29_975_214_080]  # on eight A100 of 80 GB
    for device in ("A100-80GB-SXM", "H100-SXM", "RTX-4090"):
        found = [row.run.mfu() for row in rows if row.run.device == device and row.run.fitted]
        assert find_device(device, {}).mfu == pytest.approx(median(found), abs=0.011)


def test_an_h100_is_as_much_faster_than_an_a100_as_in_print() -> None:
    speeds = {(r.device, r.parameters, r.sequence): (r.tokens_per_s, r.planned().tokens_per_s / r.devices)
              for r in published()}  # fmt: skip
    pairs = [(speeds["H100-SXM", *rest], speeds["A100-80GB-SXM", *rest])
             for device, *rest in speeds if device == "H100-SXM" and ("A100-80GB-SXM", *rest) in speeds]  # fmt: skip
    assert len(pairs) >= 6
    for (seen, planned), (of_a100, planned_of_a100) in pairs:
        assert planned / planned_of_a100 == pytest.approx(seen / of_a100, rel=0.15)


def test_a_small_model_does_not_keep_a_fast_device_busy_and_eager_kernels_are_slower() -> None:
    device, train = find_device("H100-SXM", {}), replace(RUN.train, compile=True)
    large, small = (usual_mfu(device, 989, facts_from_numbers(n, 12, 768, 1024), train) for n in (10**11, 124_000_000))
    assert large == pytest.approx(device.mfu, rel=0.01) and 0.4 < small / large < 0.5
    assert usual_mfu(device, 989, MODEL, RUN.train) == pytest.approx(0.86 * usual_mfu(device, 989, MODEL, train))
    plan = make_plan(RUN, fleet(replace(IOWA, mfu=None)), MODEL)
    assert "MFU 0.35 (as public runs: 0.46 of large models, compiled)" in plan.assumptions[0].text
    assert "speeds: 1 as public runs" in " ".join(answer(plan))
    factors = next(item.numbers for item in explain(plan) if item.name == "MFU")
    assert factors.startswith("0.46 * 0.86 * 0.878"), factors


def test_the_mfu_of_runs_in_bf16_is_a_guess_for_fp32() -> None:
    run = replace(RUN, train=replace(RUN.train, precision="fp32"))
    plan = make_plan(run, fleet(replace(IOWA, mfu=None)), MODEL)
    assert plan.assumptions[0].mark == "guessed" and "(MFU guessed)" in plan.assumptions[0].text
    assert "speeds: 1 guessed" in " ".join(answer(plan))


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
