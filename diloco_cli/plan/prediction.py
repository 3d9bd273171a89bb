"""The waterfall from ideal to predicted tokens per second, with synchronous training beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco_cli.config.settings import RunSettings
from diloco_cli.plan import goodput
from diloco_cli.plan.candidates import Candidate
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import PlannedIsland, Prediction, Schedule, Stage

SECONDS_PER_DAY = 86_400.0


def predict(
    run: RunSettings,
    kept: Sequence[Candidate],
    islands: Sequence[PlannedIsland],
    schedule: Schedule,
    model: ModelFacts,
) -> Prediction:
    """`islands[i]` is the plan of `kept[i]`."""
    availabilities = [island.availability for island in islands]
    quorum = goodput.probability_at_least(run.sync.quorum, availabilities)
    rates = [island.tokens_per_s for island in islands]
    stages = _waterfall(kept, islands, schedule, quorum)
    ideal, final = stages[0].tokens_per_s, stages[-1].tokens_per_s
    batch_tokens = sum(island.batch_tokens for island in islands)
    synchronous = goodput.synchronous_tokens_per_s([c.island for c in kept], rates, batch_tokens, model)
    return Prediction(
        tokens_per_s_ideal=ideal,
        tokens_per_s=final,
        goodput=final / ideal,
        days_to_target=run.train.tokens / final / SECONDS_PER_DAY,
        synchronous_tokens_per_s=synchronous,
        synchronous_goodput=synchronous / ideal,
        price_per_h=sum(island.price_per_h for island in islands),
        egress_per_day=sum(island.egress_per_day for island in islands),
        quorum_probability=quorum,
        all_present_probability=math.prod(availabilities),
        waterfall=stages,
    )


def _waterfall(
    kept: Sequence[Candidate], islands: Sequence[PlannedIsland], schedule: Schedule, quorum: float
) -> tuple[Stage, ...]:
    """Each stage multiplies every island's tokens/s by the share that survives it.

    Failures cost an island its absence and what had not been merged: half a round on average, and what is in
    flight; and they cost everybody the time without a quorum.
    """
    hidden_s = schedule.overlap * schedule.slot_s
    at_risk_s = schedule.round_s / 2 + hidden_s
    slowest_transfer_s = max(island.transfer_s for island in islands)
    ideal = after_idle = after_link = after_failures = 0.0
    for candidate, planned in zip(kept, islands, strict=True):
        rate = planned.tokens_per_s
        ideal += rate
        rate *= 1 - planned.idle_percent / 100
        after_idle += rate
        exchange_s = schedule.exchange_s - slowest_transfer_s + planned.transfer_s
        rate *= min(1.0, hidden_s / exchange_s)
        after_link += rate
        after_failures += rate * planned.availability * goodput.kept_work(candidate.island, at_risk_s)
    return (
        Stage("ideal", ideal),
        Stage("after idle", after_idle),
        Stage("after link", after_link),
        Stage("after failures", after_failures * quorum),
    )
