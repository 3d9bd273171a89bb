"""What cannot train is in no plan, with the way out; what launch cannot run, the plan says and launch refuses."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import Device
from diloco_cli.config.settings import IslandSettings
from diloco_cli.errors import InfeasibleError
from diloco_cli.launch.new_run import islands_of
from diloco_cli.launch.plan_files import refuse_unfit
from diloco_cli.plan.planner import make_plan
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


def test_checkpointing_takes_a_quarter_of_the_planned_speed_unless_that_was_measured() -> None:
    train = replace(RUN.train, checkpointing=True)
    slower = make_plan(replace(RUN, train=train), fleet(IOWA), MODEL).islands[0].tokens_per_s
    assert slower == pytest.approx(0.75 * make_plan(RUN, fleet(IOWA), MODEL).islands[0].tokens_per_s)
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
