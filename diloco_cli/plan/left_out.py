"""Why an island does not take part, and what would let it in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco_cli.config.settings import RunSettings, SyncSettings
from diloco_cli.plan.candidates import Candidate
from diloco_cli.plan.flow import Fleet, run_fleet
from diloco_cli.plan.link import CODEC_BITS, MBPS, known_codecs, need_of_round
from diloco_cli.plan.memory import USABLE
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Goal, LeftOut
from diloco_cli.plan.search import score
from diloco_cli.plan.worth import MOST_EVERY
from diloco_cli.units import format_bandwidth, format_count, format_duration

MOST_EVALUATED = 20  # islands whose absence is explained by evaluating the fleet with them


def left_out(
    everyone: Sequence[Candidate], fleet: Fleet | None, run: RunSettings, model: ModelFacts, goal: Goal
) -> list[LeftOut]:
    """A reason for each of `everyone` who is not in `fleet`; without a fleet, each alone."""
    taking_part = {candidate.island.name for candidate in fleet.kept} if fleet else set()
    fitting = sum(c.tokens_per_s for c in everyone if c.fit.fits)
    sync = fleet.sync if fleet else run.sync
    found: list[LeftOut] = []
    for candidate in everyone:
        if candidate.island.name in taking_part:
            continue
        if not candidate.fit.fits:
            found.append(_does_not_fit(candidate))
            continue
        kept = fleet.kept if fleet else ()
        fastest = min([candidate, *kept[:1]], key=lambda c: c.step_s)
        need = need_of_round(model, sync.codec, sync.broadcast)
        if not candidate.carries(need, sync.every * fastest.step_s):
            found.append(_link_too_slow(candidate, fastest, fitting, sync, model))
        elif fleet is None:
            found.append(LeftOut(candidate.island.name, "can take part alone, but not within the limits"))
        else:
            found.append(_not_chosen(candidate, fleet, run, model, goal, len(found) < MOST_EVALUATED))
    return found


def _does_not_fit(candidate: Candidate) -> LeftOut:
    fit, island = candidate.fit, candidate.island
    largest = sorted(fit.parts, key=lambda part: -part.gb)[:3]
    held = ", ".join(f"{part.name} {part.gb:.3g}" for part in largest)
    have = f"{fit.available_gb:g} GB, of which {100 * USABLE:.0f} % are usable"
    reason = f"needs {fit.needed_gb:.3g} GB on each accelerator ({fit.sharding}), has {have} ({held})"
    ways = []
    if fit.devices_needed:
        have_now = island.accelerators.count * island.nodes
        ways.append(f"{fit.devices_needed} accelerators instead of {have_now}")
    if fit.tensor_parallel:
        split = fit.tensor_parallel
        ways.append(f"a model that is tensor-parallel over {split} accelerators of a node (an entrypoint of your own)")
    recomputed = sum(part.gb for part in fit.parts if part.name == "activations")
    if fit.available_gb is not None and fit.needed_gb - 0.9 * recomputed <= USABLE * fit.available_gb:
        ways.append(
            f"a model that recomputes its activations ({recomputed:.3g} GB), for about a third more compute"
            " (an entrypoint of your own)"
        )
    ways.append(f"accelerators with at least {math.ceil(fit.needed_gb / USABLE)} GB")
    return LeftOut(island.name, reason, tuple(ways))


def _link_too_slow(
    candidate: Candidate, fastest: Candidate, fleet_tokens_per_s: float, sync: SyncSettings, model: ModelFacts
) -> LeftOut:
    """Why the link fails, and the ways out: a longer round, a smaller codec, a faster link, doing without."""
    link = candidate.island.link
    round_s = max(sync.every * fastest.step_s, candidate.step_s)
    need = need_of_round(model, sync.codec, sync.broadcast)
    pairs = (("up", need.up_bps(round_s), link.up_bps), ("down", need.down_bps(round_s), link.down_bps))
    short = [(way, bps, have) for way, bps, have in pairs if have is not None and bps > have]
    missing = "; ".join(f"{format_bandwidth(bps)} {way}, has {format_bandwidth(have)}" for way, bps, have in short)
    reason = f"needs {missing} ({sync.codec}, a round of {format_duration(round_s)})"
    faster = " and ".join(f"{math.ceil(bps / MBPS)} Mbps {way}" for way, bps, _ in short)
    ways = [*_longer_rounds(candidate, fastest, sync, model), f"a link of {faster}"]
    share = candidate.tokens_per_s / fleet_tokens_per_s
    if share < 1:
        ways.append(f"do without it, as this plan does: -{100 * share:.1f} % tokens/s")
    return LeftOut(candidate.island.name, reason, tuple(ways))


def _longer_rounds(candidate: Candidate, fastest: Candidate, sync: SyncSettings, model: ModelFacts) -> list[str]:
    """The shortest round that the link carries, for the codec in use and for every smaller one."""
    now = CODEC_BITS[sync.codec]
    ways = []
    for codec, bits in sorted(known_codecs().items(), key=lambda item: -item[1]):
        if bits > now:
            continue
        need = need_of_round(model, codec, min(codec, sync.broadcast, key=CODEC_BITS.__getitem__))
        every = max(sync.every, math.ceil(need.shortest_round_s(candidate.island.link) / fastest.step_s))
        change = "" if codec == sync.codec else f"--set sync.codec={codec} --set sync.broadcast={codec} "
        change += "" if every == sync.every else f"--set sync.every={every} "
        long = ", longer than any published" if every > MOST_EVERY else ""
        ways.append(f"{change}(a round of {format_duration(every * fastest.step_s)}{long})")
    return ways


def _not_chosen(
    candidate: Candidate, fleet: Fleet, run: RunSettings, model: ModelFacts, goal: Goal, evaluate: bool
) -> LeftOut:
    """Its link and memory would do: it sets too short a round for others, breaks a limit, or is not worth it."""
    name, sync = candidate.island.name, fleet.sync
    need = need_of_round(model, sync.codec, sync.broadcast)
    round_s = sync.every * candidate.step_s
    shorter = round_s < fleet.schedule.round_s
    late = [c.island.name for c in fleet.kept if not c.carries(need, round_s)] if shorter and evaluate else []
    if late:
        sequences = math.ceil(candidate.batch_tokens * fleet.schedule.round_s / round_s / model.sequence)
        others = ", ".join(late[:3]) + (f" and {len(late) - 3} more" if len(late) > 3 else "")
        reason = f"its steps of {format_duration(candidate.step_s)} would set a round of {format_duration(round_s)}"
        return LeftOut(
            name, f"{reason}, too short for the link of {others}", (f"batch_tokens: {sequences * model.sequence}",)
        )
    if not evaluate:
        return LeftOut(name, "the plan is better without it")
    kept = sorted([*fleet.kept, candidate], key=lambda c: (c.step_s, c.island.name))
    other = run_fleet(kept, sync, model)
    if score(other, run, model, goal) is None:
        price = candidate.island.price_per_h
        return LeftOut(name, f"with it the plan breaks its limits (it costs {price:g}/h)", ("a larger --budget",))
    if goal.objective == "cost":
        return LeftOut(name, f"with it a token costs more (it trains {format_count(candidate.tokens_per_s)} tokens/s)")
    change = 100 * (other.tokens_per_s / fleet.tokens_per_s - 1)
    return LeftOut(name, f"the plan is better without it: with it {change:+.2f} % tokens/s")
