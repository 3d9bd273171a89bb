"""The algorithm reduces to what everybody knows: plain training, DiLoCo, Streaming DiLoCo."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tensors.flat import flatten, unflatten
from diloco_cli.training.inner import build_optimizer, learning_rate, set_learning_rate
from tests.numerics.harness import flat, make_run, run_to_end
from tests.numerics.tiny import ROWS

ADAMW = InnerSettings(lr=0.02, warmup_steps=3, weight_decay=0.1, clip_norm=1.0)
CONSTANT = InnerSettings(lr=0.02, warmup_steps=0, schedule="constant", weight_decay=0.1)
DYADIC = InnerSettings(name="sgd", lr=0.25, warmup_steps=0, schedule="constant", weight_decay=0.0, clip_norm=0.0)


def no_overlap(**changes: object) -> SyncSettings:
    settings = {
        "every": 6,
        "fragments": 1,
        "overlap": 0,
        "merge": "avg",
        "clip": "none",
        **changes,
    }
    return SyncSettings(**settings)  # type: ignore[arg-type]


def inner_step(run: RunFormat, model: torch.nn.Module, optimizer: torch.optim.Optimizer, shard: int, step: int) -> None:
    """One step of the reference: the product's learning rate, everything else written out."""
    train, learners = run.settings.train, len(run.islands)
    fraction = step * learners * ROWS / train.tokens
    warmup = train.inner.warmup_steps * learners * ROWS / train.tokens
    set_learning_rate(optimizer, learning_rate(train.inner, fraction, warmup))
    optimizer.zero_grad()
    model(*build_data(run.settings).batch(shard, learners, step * ROWS, ROWS)).backward()
    if train.inner.clip_norm > 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.inner.clip_norm)
    optimizer.step()


def plain_training(run: RunFormat, steps: int) -> torch.Tensor:
    model = build_model(run.settings)
    optimizer = build_optimizer(model, run.settings.train.inner)
    for step in range(steps):
        inner_step(run, model, optimizer, 0, step)
    return flat(run, dict(model.named_parameters()))


def streaming_diloco(run: RunFormat, slots: int) -> torch.Tensor:
    """Synchronous (Streaming) DiLoCo in 30 lines: slot k averages fragment k mod P after (k + 1) H / P steps."""
    fragments, every = run.layout.fragments, run.settings.sync.every
    models = [build_model(run.settings) for _ in run.islands]
    optimizers = [build_optimizer(model, run.settings.train.inner) for model in models]
    replicas = [dict(model.named_parameters()) for model in models]
    outer = [torch.nn.Parameter(flatten(fragment, replicas[0])) for fragment in fragments]
    lr, momentum = run.settings.outer.lr, run.settings.outer.momentum
    descents = [torch.optim.SGD([values], lr=lr, momentum=momentum, nesterov=True) for values in outer]
    assert every % len(fragments) == 0
    step = 0
    for slot in range(slots):
        for _ in range(every // len(fragments)):
            for shard, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                inner_step(run, model, optimizer, shard, step)
            step += 1
        fragment, values = fragments[slot % len(fragments)], outer[slot % len(fragments)]
        deltas = [values.detach() - flatten(fragment, replica) for replica in replicas]
        values.grad = torch.stack(deltas).mean(dim=0)
        descents[slot % len(fragments)].step()
        for replica in replicas:
            unflatten(fragment, values.detach(), replica)
    return torch.cat([values.detach() for values in outer])


def plain_training_slot_by_slot(run: RunFormat, slots: int) -> torch.Tensor:
    """Plain training of one learner; of fragment k mod P, the values after the steps that slot k stands for."""
    fragments, every = run.layout.fragments, run.settings.sync.every
    model = build_model(run.settings)
    optimizer, own = build_optimizer(model, run.settings.train.inner), dict(model.named_parameters())
    published = [flatten(fragment, own) for fragment in fragments]
    for slot in range(slots):
        for step in range(slot * every // len(fragments), (slot + 1) * every // len(fragments)):
            inner_step(run, model, optimizer, 0, step)
        published[slot % len(fragments)] = flatten(fragments[slot % len(fragments)], own)
    return torch.cat(published)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.linalg.vector_norm(found - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


def test_one_learner_with_outer_lr_1_and_no_momentum_is_plain_training() -> None:
    run = make_run(1, 4, no_overlap(), OuterSettings("sgd", 1.0, 0.0), ADAMW)
    store, found = run_to_end(run)
    assert_close(flat(run, found), plain_training(run, steps=24))
    assert LogVerifier(store, run).replay().ok


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_one_learner_that_rebases_is_plain_training_whatever_the_overlap(overlap: int) -> None:
    """What is learned while a fragment is in flight comes back on top of it: nothing is lost, nothing counted twice."""
    sync = no_overlap(fragments=3, overlap=overlap, mixing="rebase")
    run = make_run(1, 4, sync, OuterSettings("sgd", 1.0, 0.0), CONSTANT)
    store, found = run_to_end(run)
    replay = LogVerifier(store, run).replay()
    assert replay.ok
    assert_close(flat(run, found), plain_training_slot_by_slot(run, replay.merges))


def test_one_learner_that_replaces_loses_what_it_learned_in_flight() -> None:
    """The same comparison tells replacement from rebasing: it can fail."""
    run = make_run(1, 4, no_overlap(fragments=3, overlap=1), OuterSettings("sgd", 1.0, 0.0), CONSTANT)
    store, found = run_to_end(run)
    expected = plain_training_slot_by_slot(run, LogVerifier(store, run).replay().merges)
    assert torch.linalg.vector_norm(flat(run, found) - expected) > 1e-3


def test_one_learner_is_plain_training_bit_for_bit_on_dyadic_values() -> None:
    run = make_run(1, 3, no_overlap(), OuterSettings("sgd", 1.0, 0.0), DYADIC, "slope", "dyadic_stream")
    assert torch.equal(flat(run, run_to_end(run)[1]), plain_training(run, steps=18))


@pytest.mark.parametrize(("learners", "fragments", "inner"), [(3, 1, ADAMW), (2, 3, CONSTANT)])
def test_all_learners_without_overlap_are_synchronous_streaming_diloco(
    learners: int, fragments: int, inner: InnerSettings
) -> None:
    sync = no_overlap(quorum=learners, fragments=fragments)
    run = make_run(learners, 4, sync, OuterSettings("nesterov", 0.7, 0.9), inner)
    assert len(run.layout.fragments) == fragments
    store, found = run_to_end(run)
    replay = LogVerifier(store, run).replay()
    assert replay.ok
    assert replay.merges == 4 or (replay.merges > 12 and fragments == 3), "offsets make the first round shorter"
    assert_close(flat(run, found), streaming_diloco(run, replay.merges))


def test_diloco_with_four_dyadic_learners_is_exact() -> None:
    run = make_run(4, 2, no_overlap(quorum=4), OuterSettings("nesterov", 0.5, 0.5), DYADIC, "slope", "dyadic_stream")
    assert torch.equal(flat(run, run_to_end(run)[1]), streaming_diloco(run, slots=2))


def test_the_references_can_fail() -> None:
    """The same comparison with another outer learning rate does not come out equal."""
    run = make_run(2, 2, no_overlap(quorum=2), OuterSettings("nesterov", 0.7, 0.9), ADAMW)
    other = make_run(2, 2, no_overlap(quorum=2), OuterSettings("nesterov", 0.6, 0.9), ADAMW)
    difference = flat(run, run_to_end(run)[1]) - streaming_diloco(other, slots=2)
    assert torch.linalg.vector_norm(difference) > 1e-4
