"""The baselines are what their names say: data-parallel is DDP, synchronous fleets are (Streaming) DiLoCo; and all
methods of a comparison read the same data."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

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
from examples.quality.methods.data_parallel import DataParallel, train
from examples.quality.methods.pacing import Pacing
from examples.quality.methods.schedules import decoupled, lockstep, nearly_equal, streaming, synchronous
from examples.quality.methods.trial import TrainedFleet, Trial, make_run, run_trial
from tests.forked import ForkedProcess
from tests.numerics.test_identities import ADAMW, CONSTANT, assert_close, flat, plain_training, streaming_diloco
from tests.numerics.tiny import ROWS, TinyStream

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


def distributed_rank(rank: int, folder: str, steps: int) -> None:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    run = make_run(trial(SyncSettings(), 2, steps))
    model, data, inner = build_model(run.settings), build_data(run.settings), run.settings.train.inner
    wrapped, optimizer = DistributedDataParallel(model), build_optimizer(model, inner)
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate(inner, step / steps, inner.warmup_steps / steps))
        optimizer.zero_grad()
        wrapped(*data.batch(rank, 2, step * ROWS, ROWS)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
        optimizer.step()
    if rank == 0:
        print(" ".join(value.hex() for p in model.parameters() for value in p.detach().flatten().double().tolist()))
        sys.stdout.flush()
    distributed.barrier()
    os._exit(0)  # DDP's destructor holds the GIL while it joins gloo's thread, which may be waiting for the GIL


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_data_parallel_is_what_distributed_data_parallel_computes(tmp_path: Path) -> None:
    ranks = [ForkedProcess(distributed_rank, rank, str(tmp_path), 6) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.said() for rank in ranks]
    expected = torch.tensor([float.fromhex(word) for word in ranks[0].said()[0].split()])
    job = train(make_run(trial(SyncSettings(), 2, steps=6)))
    assert_close(torch.cat([p.detach().flatten() for p in job.model.parameters()]), expected.float())


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


class Noted(TinyStream):
    """Notes every batch that is drawn from it to train on."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[int, int]] = []

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.drawn.append((shard, position))
        return super().batch(shard, num_shards, position, batch_tokens)

    def held_out(self, num_sequences: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield super().batch(999, 1, 0, ROWS)


def test_all_methods_train_on_the_same_batches_of_each_shard_in_order() -> None:
    base = SyncSettings(every=6, fragments=3, overlap=1)
    expected = {(shard, step * ROWS) for shard in range(2) for step in range(24)}
    for sync, pacings in (
        (synchronous(base, 2), lockstep(2)),
        (streaming(base, 2), lockstep(2)),
        (decoupled(base), nearly_equal(2)),
    ):
        asked = trial(sync, 2, steps=24)
        data = Noted()
        fleet = TrainedFleet(make_run(asked), pacings, data=data)
        assert fleet.played.processed == 24 * 2 * ROWS
        for shard in range(2):
            drawn = [position for number, position in data.drawn if number == shard]
            assert drawn == [step * ROWS for step in range(len(drawn))], "each once, in order"
            assert len(drawn) >= 22, "all but what no merge took any more"
        assert set(data.drawn) <= expected
    data = Noted()
    job = DataParallel(make_run(trial(base, 2, steps=24)), data=data)
    while job.tokens < 24 * 2 * ROWS:
        job.step()
    assert set(data.drawn) == expected


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
