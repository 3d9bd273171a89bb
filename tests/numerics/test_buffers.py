"""A model with running statistics: they are part of what is merged, evaluated, verified, exported and adopted."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.export.files import export_file
from diloco_cli.export.naming import whole_state
from diloco_cli.launch.new_run import with_buffers_of
from diloco_cli.layout import buffer_names
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.commits import Evaluation
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.syncer.evaluation import held_out_loss
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.replica import Replica
from diloco_cli.training.trial import check_task
from tests.numerics.harness import CLOCK, commits, make_run
from tests.numerics.test_divergence import AtOnce
from tests.numerics.virtual import VirtualFleet

ROWS, ROUNDS = 32, 24
LR = 0.01
LATE, LOOKS = 4, 12  # at this rate one look at the loss is off by up to 2 %: means of several are compared


def the_run(codec: str, mixing: str) -> RunFormat:
    sync = SyncSettings(every=8, fragments=3, quorum=1, mixing=mixing)  # type: ignore[arg-type]
    inner = InnerSettings("adamw", lr=LR, warmup_steps=0, schedule="constant", weight_decay=0.0)
    run = make_run(3, ROUNDS, sync, OuterSettings("nesterov", 0.7, 0.5), inner, "normalised", "far_stream", codec=codec)
    train = replace(run.settings.train, batch_tokens=ROWS, tokens=3 * ROUNDS * sync.every * ROWS)
    settings = replace(run.settings, train=train)
    islands = tuple(replace(island, batch_tokens=ROWS) for island in run.islands)
    return with_buffers_of(replace(run, settings=settings, islands=islands), None, check_task(settings, ROWS))


def lived(run: RunFormat) -> MemoryStore:
    """Three learners, one of which is killed and comes back."""
    fleet = VirtualFleet(run, lambda name, step: 0.05, evaluator=AtOnce)
    assert fleet.world.run(lambda: fleet.state.merges >= 8, 10_000.0)
    for actor in [actor for actor in fleet.world.actors if actor.name == "l1" and not actor.ended]:
        fleet.world.kill(actor)
    assert fleet.world.run(lambda: fleet.state.merges >= 24, 10_000.0)
    fleet._start("l1")
    return fleet.finish()


def loss_of_one_process(run: RunFormat) -> float:
    """Of the same model on the same number of tokens, in its second half."""
    torch.manual_seed(0)
    replica = Replica(run.settings, build_model(run.settings), build_data(run.settings), 0, 1)
    replica.carried = buffer_names(run.layout)
    steps, losses = run.settings.train.tokens // ROWS, []
    for step in range(1, steps + 1):
        replica.step((step - 1) * ROWS, ROWS, LR)
        if step > steps // 2 and step % (steps // 2 // LOOKS) == 0:
            losses.append(held_out_loss(replica.model.eval(), replica.data, 1))
            replica.model.train()
    assert len(losses) == LOOKS
    return mean(losses)


@pytest.mark.parametrize(("codec", "mixing"), [("fp32", "replace"), ("int4", "rebase")])
def test_running_statistics_are_part_of_the_model(tmp_path: Path, codec: str, mixing: str) -> None:
    run = the_run(codec, mixing)
    assert len(buffer_names(run.layout)) == 6
    store = lived(run)
    evaluated = [one.loss for one in commits(store) if isinstance(one, Evaluation) and one.loss is not None]
    replay, state = LogVerifier(store, run).replay(), perform(read_log(run), store, CLOCK)
    assert replay.ok, replay.mismatches
    path = tmp_path / "model.safetensors"
    export_file(run, state, store, path, whole_state(run.settings, run.layout, tied=True))
    model, found = build_model(run.settings), load_file(path)
    model.load_state_dict(found)
    exported = held_out_loss(model.eval(), build_data(run.settings), 1)
    assert exported == pytest.approx(evaluated[-1], abs=1e-6)
    assert mean(evaluated[-LATE:]) == pytest.approx(loss_of_one_process(run), rel=0.02)
    assert torch.allclose(found["norm.running_mean"], torch.tensor([20.0, -20.0]).repeat(3), atol=2.0)
    assert found["norm.num_batches_tracked"].dtype == torch.int64 and 150 < found["norm.num_batches_tracked"] < 250
