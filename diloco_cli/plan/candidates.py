"""Which islands can take part: memory first, then links against the round that the fastest island sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diloco_cli.config.devices import find_device
from diloco_cli.config.settings import Inventory, IslandSettings, RunSettings, SyncSettings
from diloco_cli.errors import UsageError
from diloco_cli.plan.link import CODEC_BITS, MBPS, need_of_round
from diloco_cli.plan.memory import USABLE, Fit, memory_fit
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import LeftOut
from diloco_cli.plan.speed import Speed, island_speed, num_devices
from diloco_cli.units import format_bandwidth, format_duration


@dataclass(frozen=True)
class Candidate:
    """An island with what does not depend on the others."""

    island: IslandSettings
    speed: Speed
    batch_tokens: int
    fit: Fit

    @property
    def step_s(self) -> float:
        """t_i = B_i x FLOPs per token / (n_i x peak x MFU), times the emulated slowdown."""
        return self.batch_tokens / self.speed.tokens_per_s


def candidates(run: RunSettings, inventory: Inventory, model: ModelFacts) -> list[Candidate]:
    """Every island of the inventory, fastest step first, names breaking ties."""
    found = [_candidate(island, run, inventory, model) for island in inventory.islands]
    return sorted(found, key=lambda candidate: (candidate.step_s, candidate.island.name))


def select(everyone: Sequence[Candidate], run: RunSettings, model: ModelFacts) -> tuple[list[Candidate], list[LeftOut]]:
    """(taking part, left out). An island whose link fails even the round it would set itself goes first."""
    left_out = [_does_not_fit(candidate) for candidate in everyone if not candidate.fit.fits]
    fitting = [candidate for candidate in everyone if candidate.fit.fits]
    total = sum(candidate.speed.tokens_per_s for candidate in fitting)
    while fitting and not _link_carries(fitting[0], _round_of(fitting[0], run), run.sync, model):
        left_out.append(_link_too_slow(fitting[0], fitting[0], total, run, model))
        fitting = fitting[1:]
    kept = []
    for candidate in fitting:
        if _link_carries(candidate, _round_of(fitting[0], run), run.sync, model):
            kept.append(candidate)
        else:
            left_out.append(_link_too_slow(candidate, fitting[0], total, run, model))
    return kept, left_out


def _candidate(island: IslandSettings, run: RunSettings, inventory: Inventory, model: ModelFacts) -> Candidate:
    batch_tokens = island.batch_tokens or run.train.batch_tokens
    if batch_tokens % model.sequence:
        whole = max(1, round(batch_tokens / model.sequence)) * model.sequence
        wrong = f"a batch of {batch_tokens} tokens is no whole number of sequences of {model.sequence}"
        raise UsageError(f"{island.name}: {wrong}", hint=f"set batch_tokens to {whole}")
    device = find_device(island.accelerators.name, inventory.devices)
    fit = memory_fit(model, num_devices(island), device.memory_gb)
    return Candidate(island, island_speed(island, inventory, model), batch_tokens, fit)


def _round_of(fastest: Candidate, run: RunSettings) -> float:
    return run.sync.every * fastest.step_s


def _link_carries(candidate: Candidate, round_s: float, sync: SyncSettings, model: ModelFacts) -> bool:
    own_round_s = max(round_s, candidate.step_s)
    return need_of_round(model, sync.codec, sync.broadcast).shortest_round_s(candidate.island.link) <= own_round_s


def _does_not_fit(candidate: Candidate) -> LeftOut:
    fit, name = candidate.fit, candidate.island.name
    have = f"{fit.available_gb:g} GB, of which {100 * USABLE:.0f} % are usable"
    reason = f"needs {fit.needed_gb:.3g} GB on each accelerator ({fit.sharding}), has {have}"
    more = (
        [f"{fit.devices_needed} accelerators instead of {num_devices(candidate.island)}"] if fit.devices_needed else []
    )
    return LeftOut(name, reason, (*more, f"accelerators with at least {fit.needed_gb / USABLE:.0f} GB"))


def _link_too_slow(
    candidate: Candidate,
    fastest: Candidate,
    fleet_tokens_per_s: float,
    run: RunSettings,
    model: ModelFacts,
) -> LeftOut:
    """Why the link fails, and the ways out: a longer round, a smaller codec, a faster link, doing without."""
    link, sync = candidate.island.link, run.sync
    round_s = max(_round_of(fastest, run), candidate.step_s)
    need = need_of_round(model, sync.codec, sync.broadcast)
    pairs = (("up", need.up_bps(round_s), link.up_bps), ("down", need.down_bps(round_s), link.down_bps))
    short = [(way, bps, have) for way, bps, have in pairs if have is not None and bps > have]
    missing = "; ".join(f"{format_bandwidth(bps)} {way}, has {format_bandwidth(have)}" for way, bps, have in short)
    reason = f"needs {missing} ({sync.codec}, a round of {format_duration(round_s)})"
    faster = " and ".join(f"{math.ceil(bps / MBPS)} Mbps {way}" for way, bps, _ in short)
    ways = [*_longer_rounds(candidate, fastest, run, model), f"a link of {faster}"]
    share = candidate.speed.tokens_per_s / fleet_tokens_per_s
    if share < 1:
        ways.append(f"do without it, as this plan does: -{100 * share:.1f} % tokens/s")
    return LeftOut(candidate.island.name, reason, tuple(ways))


def _longer_rounds(candidate: Candidate, fastest: Candidate, run: RunSettings, model: ModelFacts) -> list[str]:
    """The shortest round that the link carries, for the codec in use and for every smaller one."""
    now = CODEC_BITS[run.sync.codec]
    ways = []
    for codec, bits in sorted(CODEC_BITS.items(), key=lambda item: -item[1]):
        if bits > now:
            continue
        need = need_of_round(model, codec, min(codec, run.sync.broadcast, key=CODEC_BITS.__getitem__))
        every = max(run.sync.every, math.ceil(need.shortest_round_s(candidate.island.link) / fastest.step_s))
        change = "" if codec == run.sync.codec else f"--set sync.codec={codec} --set sync.broadcast={codec} "
        change += "" if every == run.sync.every else f"--set sync.every={every} "
        ways.append(f"{change}(a round of {format_duration(every * fastest.step_s)})")
    return ways
