"""What else could be: why an island does not take part and what would let it in; the plan made again with one thing
changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import Inventory, IslandSettings, Link, RunSettings, SyncSettings
from diloco_cli.errors import InfeasibleError
from diloco_cli.methods import INNER_OPTIMIZERS
from diloco_cli.plan.candidates import Candidate
from diloco_cli.plan.flow import MAX_EVERY, Fleet, run_fleet
from diloco_cli.plan.link import (
    CLIENT_BPS,
    CODEC_BITS,
    MBPS,
    load_of_round,
    need_of_round,
    rounded_up,
)
from diloco_cli.plan.memory import USABLE, with_micro_batch
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.money import costs
from diloco_cli.plan.plan import Alternative, Excluded, Goal, Plan, Sensitivity
from diloco_cli.plan.search import score
from diloco_cli.protocol.rules.merging import keeps_progress
from diloco_cli.units import format_bandwidth, format_duration

HARDLY = 0.1  # of the delta's bits: the most that moments saved seldom enough add
MAX_EVALUATED = 20  # islands whose absence is explained by evaluating the fleet with them


def excluded(
    everyone: Sequence[Candidate], fleet: Fleet | None, run: RunSettings, model: ModelFacts, goal: Goal
) -> list[Excluded]:
    """A reason for each candidate that is not in `fleet`; without a fleet, each is judged alone."""
    kept = fleet.kept if fleet else ()
    taking_part = {candidate.island.name for candidate in kept}
    fitting = sum(c.tokens_per_s for c in everyone if c.can_train)
    run = replace(run, sync=fleet.sync) if fleet else run
    load = load_of_round(model, run.sync.codec, run.sync.weights_codec, run.train.inner)
    found: list[Excluded] = []
    for candidate in everyone:
        name, fastest = candidate.island.name, min([candidate, *kept[:1]], key=lambda c: c.step_s)
        if name in taking_part:
            continue
        if candidate.obstacle is not None:
            found.append(candidate.obstacle)
        elif not candidate.fit.fits:
            found.append(_does_not_fit(candidate))
        elif not candidate.carries(load, run.sync.every * fastest.step_s):
            found.append(_link_too_slow(candidate, fastest, fitting, run, model))
        elif fleet is None:
            found.append(Excluded(name, "can take part alone, but not within the limits"))
        elif len(found) >= MAX_EVALUATED:
            found.append(Excluded(name, "the plan is better without it"))
        else:
            found.append(_not_chosen(candidate, fleet, run, model, goal))
    return found


def _does_not_fit(candidate: Candidate) -> Excluded:
    fit, island = candidate.fit, candidate.island
    largest = sorted(fit.parts, key=lambda part: -part.gb)[:3]
    held = ", ".join(f"{part.name} {part.gb:.3g}" for part in largest)
    have = f"{fit.available_gb:g} GB, of which {100 * USABLE:.0f} % are usable"
    reason = f"needs {fit.needed_gb:.3g} GB on each accelerator ({fit.shards}), has {have} ({held})"
    ways = []
    if fit.devices_needed:
        have_now = island.accelerators.count * island.nodes
        ways.append(f"{fit.devices_needed} accelerators instead of {have_now}")
    if fit.tensor_parallel:
        split = fit.tensor_parallel
        ways.append(f"a model that is tensor-parallel over {split} accelerators of a node (an entrypoint of your own)")
    if fit.sequences > 1 and with_micro_batch(fit, 1).fits:
        ways.append("smaller micro-batches: --set train.micro_batch_tokens=auto")
    ways += [f"--set {setting}" for setting in fit.settings]
    ways.append(f"accelerators with at least {math.ceil(fit.needed_gb / USABLE)} GB")
    return Excluded(island.name, reason, tuple(ways))


def _link_too_slow(
    candidate: Candidate, fastest: Candidate, fleet_tokens_per_s: float, run: RunSettings, model: ModelFacts
) -> Excluded:
    """Why the link is too slow, and what helps: a longer round, a smaller codec, moments saved less often, a faster
    link, leaving the island out. `run` has the chosen settings."""
    link, own, sync = candidate.link, candidate.island.link, run.sync
    round_s = max(sync.every * fastest.step_s, candidate.step_s)
    need = need_of_round(model, sync.codec, sync.weights_codec)
    load = load_of_round(model, sync.codec, sync.weights_codec, run.train.inner)
    moments = f" with the moments it saves each {run.train.inner.save_every} rounds"
    missing, faster, widest = [], [], 0.0
    for way, bare, whole, have, stated in (
        ("up", need.up_bps(round_s), load.up_bps(round_s), link.up_bps, own.up_bps),
        ("down", need.down_bps(round_s), load.down_bps(round_s), link.down_bps, own.down_bps),
    ):
        if have is None or whole <= have:
            continue
        bps, also = (bare, "") if bare > have else (rounded_up(whole, 3), moments)
        where = "" if have == stated else " in one process"
        missing.append(f"{format_bandwidth(bps)} {way}{also}, has {format_bandwidth(have)}{where}")
        faster.append(f"{format_bandwidth(rounded_up(whole, 3))} {way}")
        widest = max(widest, whole)
    reason = f"needs {'; '.join(missing)} ({sync.codec}, a round of {format_duration(round_s)})"
    ways = _longer_rounds(candidate, fastest, run, model)
    if widest <= CLIENT_BPS:
        ways.append(f"a link of {' and '.join(faster)}")
    share = candidate.tokens_per_s / fleet_tokens_per_s
    if share < 1:
        ways.append(f"do without it, as this plan does: -{100 * share:.1f} % tokens/s")
    return Excluded(candidate.island.name, reason, tuple(ways))


def _longer_rounds(candidate: Candidate, fastest: Candidate, run: RunSettings, model: ModelFacts) -> list[str]:
    """The shortest round that the link carries, for the codec in use and for every smaller one; and for the smallest
    with moments saved so seldom that they hardly count. Rounds longer than the longest published are not suggested."""
    sync, inner = run.sync, run.train.inner
    smaller = [codec for codec, bits in CODEC_BITS.items() if bits < CODEC_BITS[sync.codec]]
    codecs = [sync.codec, *sorted(smaller, key=lambda codec: -CODEC_BITS[codec])]
    state_bytes = INNER_OPTIMIZERS[inner.name].state_bytes
    seldom = 10 * math.ceil(8 * state_bytes / (10 * HARDLY * CODEC_BITS[codecs[-1]]))
    choices = [(codec, inner.save_every) for codec in codecs]
    if seldom > inner.save_every:
        choices.append((codecs[-1], seldom))
    ways = []
    for codec, save_every in choices:
        weights_codec = min(codec, sync.weights_codec, key=CODEC_BITS.__getitem__)
        load = load_of_round(model, codec, weights_codec, replace(inner, save_every=save_every))
        every = max(sync.every, candidate.least_every(load, fastest.step_s))
        changes = {
            "sync.codec": (sync.codec, codec),
            "sync.weights_codec": (sync.weights_codec, weights_codec),
            "train.inner.save_every": (inner.save_every, save_every),
            "sync.every": (sync.every, every),
        }
        change = " ".join(f"--set {key}={new}" for key, (old, new) in changes.items() if new != old)
        if every <= MAX_EVERY:
            ways.append(f"{change} (a round of {format_duration(every * fastest.step_s)})")
    return ways


def _not_chosen(candidate: Candidate, fleet: Fleet, run: RunSettings, model: ModelFacts, goal: Goal) -> Excluded:
    """For an island with enough link and memory: it breaks a limit, sets too short a round, or costs too much."""
    name, sync = candidate.island.name, fleet.sync
    other = run_fleet(sorted([*fleet.kept, candidate], key=lambda c: (c.step_s, c.island.name)), sync, model)
    then = score(other, run, model, goal)
    if then is None:
        return _breaks_limits(candidate, other, run, model, goal)
    load = load_of_round(model, sync.codec, sync.weights_codec, run.train.inner)
    round_s = sync.every * candidate.step_s
    late = [c.island.name for c in fleet.kept if not c.carries(load, round_s)]
    if late and round_s < fleet.schedule.round_s:
        sequences = math.ceil(candidate.batch_tokens * fleet.schedule.round_s / round_s / model.sequence)
        others = ", ".join(late[:3]) + (f" and {len(late) - 3} more" if len(late) > 3 else "")
        reason = f"its steps of {format_duration(candidate.step_s)} would set a round of {format_duration(round_s)}"
        return Excluded(
            name, f"{reason}, too short for the link of {others}", (f"batch_tokens: {sequences * model.sequence}",)
        )
    if goal.objective == "cost":
        without, with_it = (costs(each, run, model).per_billion_tokens for each in (fleet, other))
        return Excluded(name, f"with it 1B tokens cost {with_it:.2f} instead of {without:.2f}")
    change = 100 * (other.tokens_per_s / fleet.tokens_per_s - 1)
    if then > (score(fleet, run, model, goal) or 0.0):
        return Excluded(name, f"the search, which tries only so many sets, left it: with it {change:+.2f} % tokens/s")
    but = _worth_less(fleet, other) if change > 0 else ""
    return Excluded(name, f"the plan is better without it: with it {change:+.2f} % tokens/s{but}")


def _worth_less(fleet: Fleet, other: Fleet) -> str:
    """Why a fleet with more tokens a second scores lower."""
    if other.syncer_load > 1:
        return ", but the syncer could not merge that many in a round"
    if other.schedule.grace_s <= 0 < fleet.schedule.grace_s:
        return ", but no grace window: merges of few islands"
    return ", but they would be worth less: longer rounds"


def _breaks_limits(candidate: Candidate, other: Fleet, run: RunSettings, model: ModelFacts, goal: Goal) -> Excluded:
    """By how much `other`, the fleet with this island, exceeds the limits."""
    money, head = costs(other, run, model), "with it the plan"
    if goal.budget_per_h is not None and money.per_h > goal.budget_per_h:
        reason = f"{head} costs {money.per_h:.2f}/h, more than {goal.budget_per_h:g}/h"
        way = f"--budget {math.ceil(100 * money.per_h) / 100:g}/h"
    elif goal.budget_total is not None and money.total > goal.budget_total:
        reason = f"{head} costs {money.total:,.0f} in all, more than {goal.budget_total:,.0f}"
        way = f"--budget {math.ceil(money.total)}/run"
    else:
        seconds, max_s = run.train.tokens / other.tokens_per_s, goal.deadline_s or 0.0
        reason = f"{head} takes {format_duration(seconds)}, more than {format_duration(max_s)}"
        way = f"--deadline '{math.ceil(100 * seconds / 86_400) / 100:g} d'"
    return Excluded(candidate.island.name, reason, (way,))


MANY_ISLANDS = 200  # beyond it, only a few changes are tried
FEW_SETTINGS, FEW_CHANGES = 2, 3
MAX_CHANGES = 8  # of the hardware
WORTH_MORE = 1.005  # below this ratio of tokens/s two plans count as equal
NOTHING = 0.05  # percent: smaller gains by other hardware are not listed
MORE_OFTEN = "but learners exchange less often"
COARSER = "but deltas and versions are rounded more"
Again = Callable[[RunSettings, Inventory], Plan]


def alternatives(plan: Plan, again: Again) -> tuple[Alternative, ...]:
    """Another codec, a longer round, fewer fragments, a larger quorum, the other way to mix, each through `again`;
    and synchronous training on the same islands."""
    changes = _settings(plan)[: FEW_SETTINGS if len(plan.inventory.islands) > MANY_ISLANDS else None]
    found = [_alternative(plan, name, sync, price, again) for name, sync, price in changes]
    p = plan.prediction
    shares = f"{100 * p.synchronous_goodput:.1f} % of ideal against {100 * p.goodput:.1f} %"
    reason = f"{shares}: every step waits for the slowest link and for every absent island"
    if len(plan.islands) == 1:
        reason = f"{shares}: a single island has no other to exchange with"
    total = p.synchronous_days_to_target * 24 * plan.money.accelerators_per_h
    return (*found, Alternative("synchronous data-parallel", p.synchronous_tokens_per_s, reason, total))


def _settings(plan: Plan) -> list[tuple[str, SyncSettings, str]]:
    """(name, settings, what a gain would cost)."""
    sync, changes = plan.run.sync, []
    for codec in (codec for codec in CODEC_BITS if codec not in (sync.codec, "fp32")):
        coarser = CODEC_BITS[codec] < CODEC_BITS[sync.codec]
        other = replace(sync, codec=codec, weights_codec=codec)
        changes.append((f"sync.codec={codec}", other, COARSER if coarser else "and they are rounded less"))
    if 2 * sync.every <= MAX_EVERY:
        changes.insert(1, (f"sync.every={2 * sync.every}", replace(sync, every=2 * sync.every), MORE_OFTEN))
    if not keeps_progress(sync):
        how = "it keeps what is learned while a fragment is in flight, which the paper gives up"
        changes.append(("sync.mixing=rebase", replace(sync, mixing="rebase"), how))
    if plan.schedule.fragments > 1:
        half = max(1, plan.schedule.fragments // 2)
        changes.append((f"sync.fragments={half}", replace(sync, fragments=half), "in larger bursts"))
    majority = (len(plan.islands) + 1) // 2
    if majority > sync.quorum:
        changes.append((f"sync.quorum={majority}", replace(sync, quorum=majority), "and merges hold more of them"))
    return changes


def _alternative(plan: Plan, name: str, sync: SyncSettings, price: str, again: Again) -> Alternative:
    try:
        other = again(replace(plan.run, sync=sync), plan.inventory)
    except InfeasibleError as error:
        return Alternative(name, 0.0, f"infeasible: {error.message}")
    need = format_bandwidth(max(island.up_mbps_needed for island in other.islands) * MBPS)
    islands = "1 island" if len(other.islands) == 1 else f"{len(other.islands)} islands"
    facts = f"{islands}, {need} up, overlap {other.schedule.overlap}"
    gain = other.prediction.tokens_per_s / plan.prediction.tokens_per_s
    if gain > WORTH_MORE:
        reason = f"+{100 * (gain - 1):.1f} % tokens/s, {price}"
    elif gain < 1 / WORTH_MORE:
        reason = f"-{100 * (1 - gain):.1f} % tokens/s"
    else:
        reason = "no more tokens/s than this plan"
    return Alternative(name, other.prediction.tokens_per_s, f"{reason} ({facts})", other.money.total)


def sensitivities(plan: Plan, again: Again) -> tuple[Sensitivity, ...]:
    """The changes with an effect, the largest first."""
    limit = MAX_CHANGES if len(plan.inventory.islands) <= MANY_ISLANDS else FEW_CHANGES
    found = []
    for text, inventory in islice(_hardware(plan), limit):
        try:
            rate = again(plan.run, inventory).prediction.tokens_per_s
        except InfeasibleError:
            continue
        gain = 100 * (rate / plan.prediction.tokens_per_s - 1)
        if abs(gain) >= NOTHING:
            found.append(Sensitivity(text, rate, gain))
    return tuple(sorted(found, key=lambda item: (-abs(item.gain_percent), item.change)))


def _hardware(plan: Plan) -> Iterator[tuple[str, Inventory]]:
    """Changes that let left-out islands in; faster links; fewer failures; other speeds than guessed."""
    excluded = {island.name for island in plan.excluded}
    for island in plan.inventory.islands:
        if island.name in excluded and (faster := _carrying(island.link, plan)) is not None:
            yield f"{island.name} with {_link_text(island.link, faster)}", _with(plan, replace(island, link=faster))
    failing = [i for i in plan.inventory.islands if i.mtbf_s is not None and i.name not in excluded]
    if failing:
        calmer = [replace(i, mtbf_s=2 * i.mtbf_s) for i in failing if i.mtbf_s is not None]
        yield "every island failing half as often", _with(plan, *calmer)
        quicker = [replace(i, restart_s=i.restart_s / 2) for i in failing if i.restart_s is not None]
        if quicker:
            yield "every restart in half the time", _with(plan, *quicker)
    linked = [i for i in plan.inventory.islands if i.link.up_bps or i.link.down_bps]
    if linked:
        for factor, text in ((2.0, "every link twice as fast"), (0.5, "every link half as fast")):
            yield text, _with(plan, *(replace(i, link=_times(i.link, factor)) for i in linked))
    largest = max(plan.islands, key=lambda island: island.tokens_per_s)
    doubled = next(island for island in plan.inventory.islands if island.name == largest.name)
    if doubled.tokens_per_s is None:
        more = replace(doubled, nodes=2 * doubled.nodes, hosts=(), batch_tokens=2 * largest.batch_tokens)
        yield f"{largest.name} with twice the nodes and batch", _with(plan, more)
    if len(plan.islands) > 1:
        rest = tuple(island for island in plan.inventory.islands if island.name != largest.name)
        yield f"without {largest.name}", replace(plan.inventory, islands=rest)


def _carrying(link: Link, plan: Plan) -> Link | None:
    """The link that carries the plan's round, in two digits; None if it does already."""
    need = load_of_round(plan.model, plan.run.sync.codec, plan.run.sync.weights_codec, plan.run.train.inner)
    round_s = plan.schedule.round_s
    if need.shortest_round_s(link) <= round_s:
        return None
    return replace(
        link, up_bps=_enough(link.up_bps, need.up_bps(round_s)), down_bps=_enough(link.down_bps, need.down_bps(round_s))
    )


def _enough(have: float | None, needed: float) -> float | None:
    return have if have is None or have >= needed else rounded_up(needed, 2)


def _link_text(old: Link, new: Link) -> str:
    pairs = (("up", old.up_bps, new.up_bps), ("down", old.down_bps, new.down_bps))
    return " and ".join(f"{format_bandwidth(b)} {way}" for way, a, b in pairs if b is not None and a != b)


def _times(link: Link, factor: float) -> Link:
    return replace(link, up_bps=link.up_bps and factor * link.up_bps, down_bps=link.down_bps and factor * link.down_bps)


def _with(plan: Plan, *changed: IslandSettings) -> Inventory:
    by_name = {island.name: island for island in changed}
    return replace(plan.inventory, islands=tuple(by_name.get(i.name, i) for i in plan.inventory.islands))
