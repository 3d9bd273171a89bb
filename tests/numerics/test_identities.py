"""The algorithm reduces to what everybody knows: plain training, DiLoCo, Streaming DiLoCo."""

from __future__ import annotations

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
    """Streaming DiLoCo with a delay and a mixing, written anew: slot k is due when t * P >= (k + 1) * H, is sent then,
    and adopted when slot k + tau has been sent."""
    sync, fragments = run.settings.sync, run.layout.fragments
    assert sync.overlap != "auto"
    models = [build_model(run.settings) for _ in run.islands]
    optimizers = [build_optimizer(model, run.settings.train.inner) for model in models]
    own = [dict(model.named_parameters()) for model in models]
    outer = [torch.nn.Parameter(flatten(fragment, own[0])) for fragment in fragments]
    lr, momentum = run.settings.outer.lr, run.settings.outer.momentum
    descents = [torch.optim.SGD([values], lr=lr, momentum=momentum, nesterov=True) for values in outer]
    sent: list[list[torch.Tensor]] = []  # of each slot: every learner's parameters
    merged: list[torch.Tensor] = []
    adopted = steps = 0
    while len(merged) < slots:
        for shard, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_step(run, model, optimizer, shard, steps)
        steps += 1
        while (len(merged) + 1) * sync.every <= steps * len(fragments) and len(merged) < slots:
            index = len(merged) % len(fragments)
            sent.append([flatten(fragments[index], values) for values in own])
            outer[index].grad = torch.stack([outer[index].detach() - values for values in sent[-1]]).mean(0)
            descents[index].step()
            merged.append(outer[index].detach().clone())
        while adopted + sync.overlap < len(merged):
            fragment = fragments[adopted % len(fragments)]
            for before, values in zip(sent[adopted], own, strict=True):
                since = flatten(fragment, values) - before if sync.mixing == "rebase" else 0.0
                unflatten(fragment, merged[adopted] + since, values)
            adopted += 1
    return torch.cat([values.detach() for values in outer])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.linalg.vector_norm(found - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


def test_one_learner_with_outer_lr_1_and_no_momentum_is_plain_training() -> None:
    run = make_run(1, 4, no_overlap(), OuterSettings("sgd", 1.0, 0.0), ADAMW)
    store, found = run_to_end(run)
    assert_close(flat(run, found), plain_training(run, steps=24))
    assert LogVerifier(store, run).replay().ok


def test_one_learner_is_plain_training_bit_for_bit_on_dyadic_values() -> None:
    run = make_run(1, 3, no_overlap(), OuterSettings("sgd", 1.0, 0.0), DYADIC, "slope", "dyadic_stream")
    assert torch.equal(flat(run, run_to_end(run)[1]), plain_training(run, steps=18))


def test_diloco_with_four_dyadic_learners_is_exact() -> None:
    run = make_run(4, 2, no_overlap(quorum=4), OuterSettings("nesterov", 0.5, 0.5), DYADIC, "slope", "dyadic_stream")
    assert torch.equal(flat(run, run_to_end(run)[1]), streaming_diloco(run, slots=2))


def test_the_references_can_fail() -> None:
    """The same comparison with another outer learning rate does not come out equal."""
    run = make_run(2, 2, no_overlap(quorum=2), OuterSettings("nesterov", 0.7, 0.9), ADAMW)
    other = make_run(2, 2, no_overlap(quorum=2), OuterSettings("nesterov", 0.6, 0.9), ADAMW)
    difference = flat(run, run_to_end(run)[1]) - streaming_diloco(other, slots=2)
    assert torch.linalg.vector_norm(difference) > 1e-4
