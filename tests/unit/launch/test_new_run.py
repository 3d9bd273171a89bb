"""A name that is taken: which differences count, and which do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from diloco_cli.config.codec import replace as changed_settings
from diloco_cli.config.settings import Link, ModelSettings
from diloco_cli.errors import UsageError
from diloco_cli.launch.new_run import create_run, differences, layout_of, with_buffers_of
from diloco_cli.layout import buffer_names
from diloco_cli.store.memory import MemoryStore
from tests.cli.bucket import IOWA, NANO

RUN = replace(NANO, islands=(IOWA,))


def changed(**fields) -> list[str]:
    return differences(RUN, replace(RUN, islands=(replace(IOWA, **fields),)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"region": "eu"}, "islands.iowa.region (us there, eu here)"),
        ({"accelerator": "mps"}, "islands.iowa.accelerator (cpu there, mps here)"),
        ({"num_accelerators": 2}, "islands.iowa.num_accelerators (1 there, 2 here)"),
        ({"infra": "ssh"}, "islands.iowa.infra (local there, ssh here)"),
        ({"slowdown": 2.0}, "islands.iowa.slowdown (1.0 there, 2.0 here)"),
        ({"link": Link(up_bps=1e6)}, "islands.iowa.link.up_bps (None there, 1000000.0 here)"),
        ({"ranks": 4}, "islands.iowa.ranks (1 there, 4 here)"),
        ({"batch_tokens": 512}, "islands.iowa.batch_tokens (1024 there, 512 here)"),
    ],
)
def test_a_changed_island_is_named(fields, says):
    assert changed(**fields) == [says]


def test_planned_speeds_follow_the_machine_and_do_not_count():
    assert changed(tokens_per_s=5.0, step_s=9.0, local_steps=7) == []


class HalfKnown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("constant", torch.zeros(3))


def test_outer_settings_that_a_plan_chose_are_those_that_the_run_was_created_with():
    outer = changed_settings(RUN.settings.outer, lr=0.3, momentum=0.2)
    other = replace(RUN, settings=changed_settings(RUN.settings, outer=outer))
    assert differences(RUN, other, frozenset({"outer.lr", "outer.momentum", "sync.every"})) == []
    assert differences(RUN, other, frozenset({"outer.lr"})) == ["outer.momentum (0.9 there, 0.2 here)"]


def test_running_statistics_and_what_a_trial_has_seen_are_carried_on_one_rank_alone():
    settings = changed_settings(RUN.settings, model=ModelSettings(entrypoint=f"{__name__}:HalfKnown"))
    run = replace(RUN, settings=settings, layout=layout_of(settings))
    untried = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert buffer_names(with_buffers_of(run, None).layout) == untried
    assert buffer_names(with_buffers_of(run, None, {"seen"}).layout) == untried | {"seen"}
    with pytest.raises(UsageError, match="each rank of iowa would have its own"):
        with_buffers_of(replace(run, islands=(replace(IOWA, ranks=2),)), None)


def test_an_optimizer_that_cannot_step_on_the_model_is_refused_before_there_is_a_run():
    inner = changed_settings(RUN.settings.train.inner, name="muon")
    train = changed_settings(RUN.settings.train, inner=inner)
    settings = changed_settings(RUN.settings, model=ModelSettings(preset="gpt-pico"), train=train)
    assert layout_of(settings).num_parameters > 0
    plain = changed_settings(settings, model=ModelSettings(entrypoint=f"{__name__}:HalfKnown"))
    with pytest.raises(UsageError, match=r"train.inner.name: muon is for hidden matrices, and this model has none"):
        layout_of(plain)


def test_other_islands_are_named_both():
    other = replace(RUN, islands=(IOWA, replace(IOWA, name="ohio")))
    assert differences(RUN, other) == ["islands (iowa there, iowa, ohio here)"]


def test_the_same_run_is_gone_on_with_and_another_of_its_name_is_refused():
    store = MemoryStore()
    assert create_run(store, RUN, "memory://x")[1] == "created"
    assert create_run(store, replace(RUN, run_id="another"), "memory://x") == (RUN, "existed")
    with pytest.raises(UsageError, match="slowdown") as caught:
        create_run(store, replace(RUN, islands=(replace(IOWA, slowdown=3.0),)), "memory://x")
    assert "diloco resume memory://x" in (caught.value.hint or "")
