"""The waterfall from ideal to predicted tokens per second, with synchronous training beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco_cli.config.settings import RunSettings
from diloco_cli.plan import goodput
from diloco_cli.plan.flow import Fleet
from diloco_cli.plan.link import CODEC_BITS, FULL, MBPS, need_of_round
from diloco_cli.plan.memory import syncer_memory_gb
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Money, Prediction, Stage, SyncerNeeds
from diloco_cli.plan.schedule import STATE_BITS, SYNCER_BPS, syncer_load
from diloco_cli.units import format_bandwidth

SECONDS_PER_DAY = 86_400.0
MOST_LISTED = 16  # islands up to which P(at least k) is listed for every k
CROWDED_SYNCER = 80.0  # percent of its time that merging may take before that is worth a warning


def predict(fleet: Fleet, money: Money, run: RunSettings, model: ModelFacts) -> Prediction:
    availabilities = [candidate.availability for candidate in fleet.kept]
    flows = fleet.flows
    rates = {
        "ideal": sum(flow.ideal for flow in flows),
        "after idle": sum(flow.after_idle for flow in flows),
        "after link": sum(flow.after_link for flow in flows),
        "after failures": fleet.tokens_per_s,
    }
    tokens = run.train.tokens
    stages = tuple(Stage(name, rate, tokens / rate / SECONDS_PER_DAY) for name, rate in rates.items())
    ideal, final = stages[0].tokens_per_s, stages[-1].tokens_per_s
    islands = [candidate.island for candidate in fleet.kept]
    batch_tokens = sum(candidate.batch_tokens for candidate in fleet.kept)
    own_rates = [candidate.tokens_per_s for candidate in fleet.kept]
    synchronous = goodput.synchronous_tokens_per_s(islands, own_rates, batch_tokens, model)
    return Prediction(
        tokens_per_s_ideal=ideal,
        tokens_per_s=final,
        goodput=final / ideal,
        days_to_target=tokens / final / SECONDS_PER_DAY,
        synchronous_tokens_per_s=synchronous,
        synchronous_goodput=synchronous / ideal,
        synchronous_days_to_target=tokens / synchronous / SECONDS_PER_DAY,
        price_per_h=money.accelerators_per_h,
        egress_per_day=money.egress_per_day,
        quorum_probability=fleet.quorum_probability,
        all_present_probability=math.prod(availabilities),
        present_probabilities=_present(availabilities),
        waterfall=stages,
    )


def _present(availabilities: Sequence[float]) -> tuple[float, ...]:
    count = len(availabilities)
    return tuple(goodput.probability_at_least(k, availabilities) for k in range(1, count + 1) if count <= MOST_LISTED)


def syncer_needs(fleet: Fleet, model: ModelFacts) -> SyncerNeeds:
    """The syncer reads every island's delta once a round, and writes state and cast."""
    sync, round_s, islands = fleet.sync, fleet.schedule.round_s, len(fleet.kept)
    up_bits, down_bits = CODEC_BITS[sync.codec], CODEC_BITS[sync.broadcast]
    need = need_of_round(model, sync.codec, sync.broadcast)
    written_bits = model.parameters * STATE_BITS + need.down_bits
    return SyncerNeeds(
        memory_gb=syncer_memory_gb(model, fleet.schedule.fragment_parameters, up_bits, down_bits),
        down_mbps=(islands * need.up_bits + written_bits) / round_s / MBPS,
        up_mbps=written_bits / round_s / MBPS,
        merge_percent=100 * syncer_load(model.parameters, islands, round_s),
    )


def syncer_warnings(needs: SyncerNeeds) -> list[str]:
    warnings: list[str] = []
    if needs.merge_percent > CROWDED_SYNCER:
        warnings.append(
            f"the syncer would spend {needs.merge_percent:.0f} % of its time merging: fewer islands, or a longer round"
            " (--set sync.every=...)"
        )
    for way, mbps in (("down", needs.down_mbps), ("up", needs.up_mbps)):
        if mbps * MBPS > FULL * SYNCER_BPS:
            warnings.append(
                f"the syncer needs {format_bandwidth(mbps * MBPS)} {way}, and a link of {format_bandwidth(SYNCER_BPS)}"
                " is guessed: fewer islands, a smaller codec, or a longer round (--set sync.every=...)"
            )
    return warnings
