"""The baselines are what their names say: data-parallel is DDP, synchronous fleets are (Streaming) DiLoCo; and all
methods of a comparison read the same data."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import (
    DataSettings,
    InnerSettings,
    ModelSettings,
    OuterSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.inner import build_optimizer, learning_rate, set_learning_rate
from examples.quality.methods.data_parallel import train
from examples.quality.methods.pacing import Pacing
from examples.quality.methods.schedules import decoupled, lockstep, nearly_equal, streaming, synchronous
from examples.quality.methods.trial import TrainedFleet, Trial, make_run, run_trial
from tests.numerics.test_identities import ADAMW, CONSTANT, assert_close, flat, plain_training, streaming_diloco
from tests.numerics.tiny import ROWS

FP32 = {"codec": "fp32", "weights_codec": "fp32"}


def trial(
    sync: SyncSettings, learners: int, steps: int, inner: InnerSettings = ADAMW,
    outer: OuterSettings | None = None, pacings: tuple[Pacing, ...] | None = None,
) -> Trial:  # fmt: skip
    settings = RunSettings(
        name="tiny",
        model=ModelSettings(entrypoint="tests.numerics.tiny:regression"),
        data=DataSettings(entrypoint="tests.numerics.tiny:stream"),
        train=TrainSettings(tokens=steps * learners * ROWS, batch_tokens=ROWS, inner=inner),
        sync=replace(sync, **FP32),  # type: ignore[arg-type]
        outer=outer or OuterSettings("nesterov", 0.7, 0.9),
    )
    return Trial("fleet", settings, pacings or lockstep(learners), 1, sequences=1)


def played(asked: Trial) -> tuple[RunFormat, torch.Tensor]:
    """The fleet's run, and the outer parameters after its last merge."""
    fleet = TrainedFleet(make_run(asked), asked.pacings, asked.quantum_tokens)
    return fleet.run, flat(fleet.run, fleet.outer_parameters())


# -- data-parallel ----------------------------------------------------------------------------------------------------


def one_large_batch(run: RunFormat, steps: int) -> torch.Tensor:
    """Plain training on the batches of all shards put together."""
    settings, shards = run.settings.train, len(run.islands)
    model, data = build_model(run.settings), build_data(run.settings)
    optimizer = build_optimizer(model, settings.inner)
    for step in range(steps):
        fraction, warmup = step / steps, settings.inner.warmup_steps / steps
        set_learning_rate(optimizer, learning_rate(settings.inner, fraction, warmup))
        batches = [data.batch(shard, shards, step * ROWS, ROWS) for shard in range(shards)]
        optimizer.zero_grad()
        model(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.inner.clip_norm)
        optimizer.step()
    return flat(run, dict(model.named_parameters()))


@pytest.mark.parametrize("learners", [1, 2, 4])
def test_data_parallel_is_one_process_with_the_batches_put_together(learners: int) -> None:
    run = make_run(trial(SyncSettings(), learners, steps=12))
    job = train(run)
    assert (job.steps, job.tokens) == (12, 12 * learners * ROWS)
    assert_close(flat(run, dict(job.model.named_parameters())), one_large_batch(run, 12))


def test_data_parallel_of_one_rank_is_plain_training() -> None:
    run = make_run(trial(SyncSettings(), 1, steps=12))
    assert torch.equal(flat(run, dict(train(run).model.named_parameters())), plain_training(run, steps=12))


# -- synchronous and streaming DiLoCo ---------------------------------------------------------------------------------


@pytest.mark.parametrize("learners", [2, 3])
def test_a_synchronous_fleet_computes_diloco(learners: int) -> None:
    run, found = played(trial(synchronous(SyncSettings(every=6), learners), learners, steps=24))
    assert_close(found, streaming_diloco(run, slots=4))


def test_a_streaming_fleet_without_overlap_computes_streaming_diloco() -> None:
    asked = trial(streaming(SyncSettings(every=6, fragments=3, overlap=0), 2), 2, steps=24, inner=CONSTANT)
    run, found = played(asked)
    assert_close(found, streaming_diloco(run, slots=12))


def test_a_decoupled_fleet_is_another_trajectory() -> None:
    """Whoever does not wait is a step further when a merge arrives: the comparison can fail."""
    sync = replace(decoupled(SyncSettings(every=6, overlap=1, quorum=1)), fragments=1, merge="avg")
    run, found = played(trial(sync, 2, steps=24))
    difference = torch.linalg.vector_norm(found - streaming_diloco(run, slots=4))
    assert difference > 1e-3


# -- the same data, the same end --------------------------------------------------------------------------------------


def test_a_trial_tells_loss_and_curve_of_either_kind() -> None:
    asked = trial(synchronous(SyncSettings(every=6), 2), 2, steps=24)
    fleet = run_trial(asked)
    parallel = run_trial(replace(asked, kind="data_parallel"))
    assert (fleet.merges, fleet.participation, fleet.processed, fleet.merged) == (4, 1.0, 192, 192)
    assert (parallel.merges, parallel.processed) == (24, 192)
    for outcome in (fleet, parallel):
        assert outcome.curve[-1] == (192, outcome.loss)
        assert [tokens for tokens, _ in outcome.curve] == sorted(tokens for tokens, _ in outcome.curve)
    assert fleet.loss != parallel.loss


def test_the_schedule_of_the_learning_rate_ends_with_the_last_merge_whatever_was_given_up() -> None:
    """`replace` processes more than it merges; all methods end at the same learning rate all the same."""
    asked = trial(decoupled(SyncSettings(every=6, fragments=3, overlap=1)), 2, steps=24, pacings=nearly_equal(2))
    fleet = TrainedFleet(make_run(asked), asked.pacings)
    merged = fleet.played.state.tokens(fleet.run.layout)
    assert fleet.run.settings.train.tokens == merged < fleet.played.processed
    assert fleet.played.state.merges == fleet.merges, "the merges that the fleet without training had"
