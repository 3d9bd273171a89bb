"""What cannot train is in no plan, with the way out; what launch cannot run, the plan says and launch refuses."""

from __future__ import annotations

from statistics import median

import pytest

from diloco_cli.cli.plan_view import answer
from diloco_cli.cli.preflight import refuse_unfit
from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Accelerators, Device, find_device
from diloco_cli.config.models import facts_from_numbers
from diloco_cli.config.settings import Inventory, IslandSettings, LocalMachine, StoreSettings
from diloco_cli.errors import InfeasibleError
from diloco_cli.launch.plan_files import islands_of
from diloco_cli.plan.candidates import busy_cores, candidates, share_of_cores, shared_cores, usual_mfu
from diloco_cli.plan.planner import make_plan
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


def test_the_mfu_of_runs_in_bf16_is_a_guess_for_fp32() -> None:
    run = replace(RUN, train=replace(RUN.train, precision="fp32"))
    plan = make_plan(run, fleet(replace(IOWA, mfu=None)), MODEL)
    assert plan.assumptions[0].mark == "guessed" and "(MFU guessed)" in plan.assumptions[0].text
    assert "speeds: 1 guessed" in " ".join(answer(plan))
