"""The learning rate of one inner step: a pure function of where the run stands and of this incarnation's own steps."""

from __future__ import annotations

from diloco_cli.learner.inner import REWARM_STEPS, learning_rate
from diloco_cli.protocol.records import RunFormat


def step_learning_rate(run: RunFormat, fraction: float, own_steps: int, moments_lost: bool) -> float:
    """At `fraction` of the run (see protocol.schedule.fraction_of_run), for the step after `own_steps` of this
    incarnation. One that lost its moments warms up anew."""
    train = run.settings.train
    warmup_tokens = train.inner.warmup_steps * sum(island.batch_tokens for island in run.islands)
    lr = learning_rate(train.inner, fraction, warmup_tokens / train.tokens)
    return lr * min(1.0, (own_steps + 1) / REWARM_STEPS) if moments_lost else lr
