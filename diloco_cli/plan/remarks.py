"""What a plan says of itself: its assumptions, each marked guessed, catalogue or measured; what to look at, and what to
change.

What else could be: why an island does not take part and what would let it in; the plan made again with one thing
changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from diloco_cli.config.codec import replace
from diloco_cli.config.hardware import HOST_DEVICES, find_device
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.settings import Inventory, IslandSettings, Link, OuterSettings, RunSettings, SyncSettings
from diloco_cli.errors import InfeasibleError, UsageError
from diloco_cli.methods import FEW_ROUNDS, fitting_outer
from diloco_cli.plan.candidates import (
    GUESSED_RESTART_S,
    TERA,
    Candidate,
    crossing_of,
    leaves_its_region,
    not_launched,
    num_devices,
    peak_tflops,
    shares_cores,
)
from diloco_cli.plan.flow import (
    CLASS_A_PRICE,
    CLASS_B_PRICE,
    MAX_EVERY,
    PER_DOUBLING,
    STORAGE_PRICE,
    Fleet,
    costs,
    max_overlap,
    run_fleet,
)
from diloco_cli.plan.link import (
    CLIENT_BPS,
    CODEC_BITS,
    MBPS,
    MERGE_PARAMETERS_PER_S,
    SYNCER_BPS,
    Need,
    guessed_rtt_s,
    is_bucket,
    load_of_round,
    machine_of,
    rounded_up,
)
from diloco_cli.plan.memory import USABLE, Fit, Precision, with_micro_batch
from diloco_cli.plan.plan import Alternative, Assumption, Excluded, Goal, Plan, Schedule, SyncerNeeds
from diloco_cli.plan.search import FREE_HEADROOM, HEADROOM, LANES, LEAST_ROUNDS, loss_of, score
from diloco_cli.protocol.log.commit_log import SNAPSHOT_HOLDS
from diloco_cli.protocol.rules.quorum import covering_slots
from diloco_cli.quantities import MAX_NAMES, format_bandwidth, format_count, format_duration, some_of


def assumptions(
    run: RunSettings, kept: Sequence[Candidate], model: ModelFacts, inventory: Inventory, searched: bool
) -> tuple[Assumption, ...]:
    """Speeds first, then values that the inventory does not give, then assumptions of every plan."""
    islands = [candidate.island for candidate in kept]
    guesses = [*_of_the_inventory(kept, inventory), *_of_the_model(run, model)]
    inner = "AdamW" if run.train.inner.name == "adamw" else run.train.inner.name
    guesses.append(f"memory: float32 weights, gradients and {inner}; a micro-batch a device at a time")
    guesses.append("islands fail independently of each other")
    if searched:
        guesses.append(f"the search takes a doubling of H beyond 50 to cost {100 * PER_DOUBLING:.0f} % of the tokens")
    guesses += _of_the_syncer(inventory)
    if any(island.price_per_h or island.egress_per_gb for island in islands):
        guesses.append(
            f"requests {1e6 * CLASS_A_PRICE:g} a million writes, {1e6 * CLASS_B_PRICE:g} a million reads;"
            f" storage {30 * STORAGE_PRICE:g} per GB and month"
        )
        uploading, downloading = without_egress_price(islands, inventory)
        home = inventory.store.region or "of the store (store.region)"
        usual = "0.02 to 0.12/GB is usual"
        guesses += _about(
            (f"uploads out of their region have no price, egress of it: {usual}", uploading),
            (f"downloads out of the store's region have no price, egress of the region {home}: {usual}", downloading),
        )
    merging = f"the syncer merges {format_count(MERGE_PARAMETERS_PER_S)} parameters of one learner a second"
    measured = Assumption(f"{merging} (diloco's merge benchmark: int8, one core of an AMD EPYC)", "measured")
    guessed = (Assumption(text, "guessed") for text in guesses)
    return (*_speeds(kept), *_sharing(kept, inventory), measured, *guessed)


def without_egress_price(
    islands: Sequence[IslandSettings], inventory: Inventory
) -> tuple[list[IslandSettings], list[IslandSettings]]:
    """Whose uploads, and whose downloads, leave a region for which no price of that is given. What costs nothing by the
    hour is somebody's own, and sends for nothing; a folder's region bills nobody."""
    crossing = [i for i in islands if leaves_its_region(i, inventory) or crossing_of(i, inventory) is not None]

    def priced(region: str | None) -> bool:
        return getattr(inventory.regions.get(region or ""), "egress_per_gb", None) is not None

    uploading = [i for i in crossing if i.price_per_h and i.egress_per_gb is None and not priced(i.region)]
    billed = is_bucket(inventory.store.url) and not priced(inventory.store.region)
    return uploading, crossing if billed else []


def _speeds(kept: Sequence[Candidate]) -> list[Assumption]:
    """One line per island; islands with the same source share a line."""
    if len(kept) <= MAX_NAMES:
        return [candidate.assumption for candidate in kept]
    by_source: dict[tuple[str, str], list[str]] = {}
    for candidate in kept:
        name, assumption = candidate.island.name, candidate.assumption
        text = assumption.text.removeprefix(f"{name}: ")
        by_source.setdefault((text, assumption.mark), []).append(name)
    return [Assumption(f"{some_of(names)}: {text}", mark) for (text, mark), names in by_source.items()]  # type: ignore[arg-type]


def _sharing(kept: Sequence[Candidate], inventory: Inventory) -> list[Assumption]:
    local = [candidate.island.name for candidate in kept if shares_cores(candidate.island, None)]
    if inventory.local is None and len(local) > 1:
        text = "planned as if each had cores of its own; measure this machine: diloco inventory probe -f RUN"
        return [Assumption(f"{some_of(local)}: {text}", "guessed")]
    if inventory.local is None:
        return []
    by_share: dict[str, list[str]] = {}
    for candidate in kept:
        if candidate.share < 1:
            by_share.setdefault(f"{candidate.share:.2f}", []).append(candidate.island.name)
    cores = f"share {inventory.local.cores} cores"
    return [Assumption(f"{some_of(names)}: {cores}, speeds x {share}", "guessed") for share, names in by_share.items()]


def _of_the_inventory(kept: Sequence[Candidate], inventory: Inventory) -> list[str]:
    """Values that the inventory does not give. A missing price is named if other islands have one."""
    islands = [candidate.island for candidate in kept]
    priced = any(island.price_per_h for island in inventory.islands)
    rtt, restart = format_duration(guessed_rtt_s(inventory.store.url)), format_duration(GUESSED_RESTART_S)
    failing = [i for i in islands if i.mtbf_s is not None]
    return _about(
        (
            f"a process moves {format_bandwidth(CLIENT_BPS)} to a bucket at most, less than the link",
            [c.island for c in kept if c.link_is_faster],
        ),
        ("no uplink given, taken as fast enough", [i for i in islands if not i.link.up_bps]),
        ("no downlink given, taken as fast enough", [i for i in islands if not i.link.down_bps]),
        (f"no rtt given, taken as {rtt}", [i for i in islands if i.link.rtt_s is None]),
        ("no mtbf given, taken as never failing", [i for i in islands if i.mtbf_s is None]),
        (f"no restart given, taken as {restart}", [i for i in failing if i.restart_s is None]),
        ("no price given, taken as free", [i for i in islands if priced and not i.price_per_h]),
    )


def _of_the_syncer(inventory: Inventory) -> list[str]:
    """Of its machine's link to the bucket, `store.link`, what is not given, or more than its process moves."""
    link, machine = inventory.store.link, machine_of(inventory.store)
    guesses = [] if link.rtt_s is not None else [f"takes {format_duration(machine.call_s)} for a call to the store"]
    ways = (("reads", link.down_bps, machine.down_bps), ("writes", link.up_bps, machine.up_bps))
    unknown = [(verb, used or SYNCER_BPS) for verb, given, used in ways if given is None]
    guesses += [f"{' and '.join(verb for verb, _ in unknown)} {format_bandwidth(unknown[0][1])}"] if unknown else []
    told = [f"the syncer's machine {' and '.join(guesses)} (store.link in the inventory)"] if guesses else []
    if any(given is not None and given != used for _, given, used in ways):
        told.append(f"the syncer moves {format_bandwidth(CLIENT_BPS)} to a bucket at most, less than its link")
    if machine.reads_back:
        told.append("the syncer reads versions back: this store is not known to check uploads")
    return told


def _of_the_model(run: RunSettings, model: ModelFacts) -> list[str]:
    guesses = []
    if run.model.preset is None:
        guesses.append(f"model: {format_count(model.embedding_parameters)} of the parameters are its embedding")
    if run.model.entrypoint and not run.model.parameters:
        guesses.append(
            f"model: {format_count(model.parameters)} parameters, as {run.model.entrypoint} builds them; from their"
            f" names and shapes {model.layers} layers of width {model.width}; sequences of {model.sequence} tokens"
        )
    return guesses


def _about(*guesses: tuple[str, Sequence[IslandSettings]]) -> list[str]:
    """One line for each that is about any island."""
    return [f"{some_of([island.name for island in islands])}: {text}" for text, islands in guesses if islands]


YEAR_D = 365.0
WEEK_D = 7.0
LONG_STEP_S = 60.0
GOOD_STEP_S = 10.0
FULL = 0.8  # a link used beyond this share of its capacity is worth a warning
LATE_STEP = 1.5  # a step longer than this many rounds makes its island miss merges
SLOW_FABRIC = 0.75  # a warning, where ranks that wait for each other have a smaller share of their speed left
IDLE_ACCELERATORS = 0.9  # a batch that keeps a smaller share of them busy gets a warning
CROWDED = 100 * FREE_HEADROOM  # percent of a slot; a syncer that needs more gets a warning
NOTABLY = 1.02  # a longer round by less than that is no advice
TAKES = {"calls": "its calls to the store", "bytes": "its link", "processor": "its processor"}


def horizon_warnings(tokens: int, days: float) -> list[str]:
    """A target that nobody will wait for."""
    if days <= YEAR_D:
        return []
    in_a_week = rounded_down(tokens * WEEK_D / days)
    return [
        f"{format_count(tokens)} tokens take {days / YEAR_D:.1f} years on this hardware: --set"
        f" train.tokens={format_count(in_a_week)} takes a week; or a smaller model, or more islands"
    ]


def is_too_short(outer: OuterSettings, inner: str, rounds: float) -> bool:
    """Whether the run has too few rounds for its outer momentum to reach its speed."""
    given = outer.momentum
    return rounds < FEW_ROUNDS[-1][0] and given != "auto" and given > fitting_outer(inner, rounds)[1]


def round_warnings(outer: OuterSettings, inner: str, rounds: float) -> list[str]:
    """An outer momentum that needs more rounds than the run has to reach its speed."""
    if not is_too_short(outer, inner, rounds):
        return []
    head = (
        f"{max(1, round(rounds))} outer rounds are few for an outer momentum of {outer.momentum:g}"
        " (0.9 costs 9 % in 20 rounds)"
    )
    return [f"{head}: --set outer.momentum={fitting_outer(inner, rounds)[1]:g}, or shorter rounds (sync.every)"]


def step_warnings(name: str, step_s: float, batch_tokens: int, sequence: int) -> list[str]:
    """A step during which nothing is seen or exchanged, and after whose interruption much is lost."""
    if step_s <= LONG_STEP_S:
        return []
    head = f"{name}: one step takes {format_duration(step_s)}"
    fitting = int(batch_tokens * GOOD_STEP_S / step_s) // sequence * sequence
    if fitting >= sequence:
        return [f"{head}: batch_tokens: {fitting} makes it {format_duration(step_s * fitting / batch_tokens)}"]
    one = step_s * sequence / batch_tokens
    return [f"{head}, and {format_duration(one)} with a single sequence: a smaller model, or a faster device"]


def rounded_down(value: float) -> int:
    """To one significant digit: 48_300_000 -> 40_000_000."""
    scale: int = 10 ** max(0, len(str(int(value))) - 1)
    return max(1, int(value) // scale * scale)


def schedule_warnings(schedule: Schedule) -> list[str]:
    if schedule.slack_s > 0:
        return []
    needed = covering_slots(schedule.exchange_s, schedule.slot_s)
    have = f"the overlap of {schedule.overlap} slots of {schedule.slot_s:.3g} s"
    head = f"{have} does not hide an exchange of {schedule.exchange_s:.3g} s, so there is no grace window"
    if needed <= max_overlap(schedule.fragments):
        return [f"{head}: --set sync.overlap={needed}"]
    every = math.ceil(schedule.sync_every * needed / max_overlap(schedule.fragments))
    return [f"{head}: it takes {needed} slots, more than a round has; --set sync.every={every}"]


def snapshot_warnings(islands: int, fragments: int) -> list[str]:
    """A run whose log soon opens slowly."""
    if islands * fragments <= SNAPSHOT_HOLDS:
        return []
    head = f"{islands} islands with {fragments} fragments outgrow the log's snapshots, so every process reads all of it"
    return [f"{head}: --set sync.fragments={max(1, SNAPSHOT_HOLDS // islands)}"]


def link_warnings(name: str, link: Link, need: Need, round_s: float) -> list[str]:
    """Warnings about directions that will be nearly full: if the link slows down, the island is late."""
    pairs = (
        ("up", need.up_bps(round_s), link.up_bps),
        ("down", need.down_bps(round_s), link.down_bps),
    )
    return [
        f"{name}: {way}link {100 * needed / have:.0f} % full in steady state"
        for way, needed, have in pairs
        if have is not None and needed > FULL * have
    ]


def speed_warnings(island: IslandSettings, inventory: Inventory, model: ModelFacts, precision: Precision) -> list[str]:
    """A measured speed above the peak, or above what even large matrix products reach of it."""
    device = find_device(island.accelerators.name, inventory.devices)
    if device.name in HOST_DEVICES or not island.tokens_per_s:
        return []
    try:
        tflops, kind = peak_tflops(device, precision)
    except UsageError:
        return []  # nothing to compare with
    most = device.achievable or 1.0
    mfu = island.tokens_per_s * model.flops_per_token / (num_devices(island) * tflops * TERA)
    if mfu <= most:
        return []
    least = f"; large matrix products reach {100 * most:.0f} %" if most < 1 else ""
    return [
        f"{island.name}: {island.tokens_per_s:g} tokens/s would be {100 * mfu:.0f} % of the {kind} peak of"
        f" {num_devices(island)} x {device.name}{least}: measured with this model?"
    ]


def tight(name: str, fit: Fit) -> list[str]:
    """Whether it fits only with fewer fragments on their way than the schedule has. No reason to leave the island out:
    all of them are on their way at once only where its link is slow or merges are late."""
    if fit.fits:
        return []
    need, have = f"{fit.needed_gb:.3g} GB", f"{fit.usable_gb:.3g} GB"
    smaller = ", or train.micro_batch_tokens" if fit.sequences > 1 else ""
    return [f"{name}: with all that may be on its way it needs {need} of {have}: lower sync.overlap{smaller}"]


def island_warnings(
    candidate: Candidate, fleet: Fleet, run: RunSettings, inventory: Inventory, model: ModelFacts
) -> list[str]:
    name, step_s, schedule = candidate.island.name, candidate.step_s, fleet.schedule
    load = load_of_round(model, fleet.sync, run.train.inner)
    warnings = link_warnings(candidate.island.name, candidate.link, load, max(schedule.round_s, step_s))
    unfit = not_launched(candidate.island, inventory)
    warnings += [] if unfit is None else [f"{name}: launch cannot run it: {unfit[0]}; {unfit[1]}"]
    warnings += speed_warnings(candidate.island, inventory, model, run.train.precision)
    if step_s > LATE_STEP * schedule.round_s:
        rounds = step_s / schedule.round_s
        warnings.append(f"{name}: one step takes {rounds:.1f} rounds; lower its batch_tokens or raise sync.every")
    warnings += step_warnings(name, step_s, candidate.batch_tokens, model.sequence)
    if run.train.sharding == "fsdp" and not model.divides and candidate.island.num_ranks > 1:
        warnings.append(
            f"{name}: the model has no blocks that could be sharded (an nn.ModuleList): a copy on each rank"
        )
    if candidate.busy < IDLE_ACCELERATORS:
        sequences, count = candidate.batch_tokens // model.sequence, num_devices(candidate.island)
        better = count * max(1, round(sequences / count)) * model.sequence
        warnings.append(
            f"{name}: {sequences} sequences a step keep {100 * candidate.busy:.0f} % of {count} accelerators busy;"
            f" batch_tokens: {better} keeps all"
        )
    if candidate.ring is not None and candidate.beside_fabric < SLOW_FABRIC:
        waits, ways = f"{100 * (1 - candidate.beside_fabric):.0f} %", ["more batch_tokens"]
        ways += ["an island of each node"] if candidate.island.nodes > 1 else []
        warnings.append(
            f"{name}: its ranks wait for each other {waits} of the time, on {candidate.ring.words}; {' or '.join(ways)}"
        )
    return warnings


def syncer_warnings(needs: SyncerNeeds, fleet: Fleet) -> list[str]:
    """A warning where the syncer is nearly as slow as the slots, or slower; with what would help."""
    if needs.busy_percent <= CROWDED:
        return []
    slot, fastest = (format_duration(seconds) for seconds in (fleet.schedule.slot_s, needs.fastest_slot_s))
    most = f"most of it for {TAKES[needs.limit]}"
    if needs.busy_percent <= 100:
        head = f"the syncer needs {fastest} for each slot of {slot}, {most}"
    else:
        times = f"rounds take {needs.busy_percent / 100:.2g} times as long"
        head = f"the syncer cannot hold slots of {slot}: a merge takes it {fastest}, {most}; {times}"
    return [": ".join(filter(None, (head, "; or ".join(_ways(needs, fleet)))))]


def _ways(needs: SyncerNeeds, fleet: Fleet) -> Iterator[str]:
    """The round in which the syncer would be free for a fifth of each slot; what to change about its machine."""
    machine, every = fleet.kept[0].syncer, math.ceil(fleet.sync.every * needs.busy_percent / CROWDED)
    if NOTABLY * fleet.sync.every < every <= MAX_EVERY:
        yield f"--set sync.every={every}"
    if needs.limit == "calls":
        yield f"a syncer nearer to its bucket than {format_duration(machine.call_s)} a call (store.link.rtt)"
    elif needs.limit == "bytes" and min(machine.up_bps or math.inf, machine.down_bps or math.inf) < CLIENT_BPS:
        yield "a faster link of the syncer's machine (store.link)"


MAX_EVALUATED = 20  # islands whose absence is explained by evaluating the fleet with them


def excluded(
    everyone: Sequence[Candidate], fleet: Fleet | None, run: RunSettings, model: ModelFacts, goal: Goal
) -> list[Excluded]:
    """A reason for each candidate that is not in `fleet`; without a fleet, each is judged alone."""
    kept = fleet.kept if fleet else ()
    taking_part = {candidate.island.name for candidate in kept}
    fitting = sum(c.tokens_per_s for c in everyone if c.can_train)
    run = replace(run, sync=fleet.sync) if fleet else run
    load = load_of_round(model, run.sync, run.train.inner)
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
    need = Need(model.parameters * CODEC_BITS[sync.codec], model.parameters * CODEC_BITS[sync.weights_codec])
    load = load_of_round(model, sync, run.train.inner)
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
    """The shortest round that the link carries, for the codec in use and for every smaller one. Rounds longer than the
    longest published are not suggested."""
    sync, ways = run.sync, []
    smaller = [codec for codec, bits in CODEC_BITS.items() if bits < CODEC_BITS[sync.codec]]
    for codec in (sync.codec, *smaller):
        weights_codec = min(codec, sync.weights_codec, key=CODEC_BITS.__getitem__)
        load = load_of_round(model, replace(sync, codec=codec, weights_codec=weights_codec), run.train.inner)
        every = max(sync.every, candidate.least_every(load, fastest.step_s))
        changes = {
            "sync.codec": (sync.codec, codec),
            "sync.weights_codec": (sync.weights_codec, weights_codec),
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
    if score(other, run, model, goal) is None:
        money, seconds = costs(other, run, model), run.train.tokens / other.tokens_per_s
        found = f"{money.per_h:.2f}/h, {money.total:,.0f} in all, {format_duration(seconds)}"
        return Excluded(name, f"with it the plan is beyond the limits: {found}")
    load = load_of_round(model, sync, run.train.inner)
    round_s = sync.every * candidate.step_s
    late = [c.island.name for c in fleet.kept if not c.carries(load, round_s)]
    if late and round_s < fleet.schedule.round_s:
        sequences = math.ceil(candidate.batch_tokens * fleet.schedule.round_s / round_s / model.sequence)
        reason = f"its steps of {format_duration(candidate.step_s)} would set a round of {format_duration(round_s)}"
        way = f"batch_tokens: {sequences * model.sequence}"
        return Excluded(name, f"{reason}, too short for the link of {some_of(late)}", (way,))
    if goal.objective == "cost":
        without, with_it = (costs(each, run, model).per_billion_tokens for each in (fleet, other))
        if with_it >= without:
            return Excluded(name, f"with it 1B tokens cost {with_it:.2f} instead of {without:.2f}")
    if goal.objective == "loss":
        before, after = (loss_of(each, run, model) or 0.0 for each in (fleet, other))
        if after > before:
            return Excluded(
                name, f"with it the loss is {after:+.1f} % over data-parallel training, instead of {before:.1f} %"
            )
    busy = load.busy_s(candidate.link) / max(other.schedule.round_s, candidate.step_s)
    if busy > LANES:
        calls = f"calls of {format_duration(candidate.rtt_s)} included"
        return Excluded(name, f"its link would be {100 * busy:.0f} % busy, {calls}")
    if other.syncer_load > max(HEADROOM, fleet.syncer_load):
        return Excluded(name, f"with it the syncer would be {100 * other.syncer_load:.0f} % busy")
    change = 100 * (other.tokens_per_s / fleet.tokens_per_s - 1)
    return Excluded(name, f"the plan is better without it: with it {change:+.2f} % tokens/s")


MANY_ISLANDS = 200  # beyond it, only a few changes are tried
FEW_SETTINGS = 2
FEWER = 0.45  # of the rounds that the search keeps, or that the plan has: no such change is advised; twice the H may be
WORTH_MORE = 1.005  # below this ratio of tokens/s two plans count as equal
SYNCHRONOUS = "synchronous data-parallel"
MORE_OFTEN = "but learners exchange less often"
COARSER = "but deltas and versions are rounded more"
Again = Callable[[RunSettings], Plan]


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
    return (*found, Alternative(SYNCHRONOUS, p.synchronous_tokens_per_s, reason, total))


def _settings(plan: Plan) -> list[tuple[str, SyncSettings, str]]:
    """(name, settings, what a gain would cost)."""
    sync, changes = plan.run.sync, []
    for codec in (codec for codec in CODEC_BITS if codec not in (sync.codec, "fp32")):
        coarser = CODEC_BITS[codec] < CODEC_BITS[sync.codec]
        other = replace(sync, codec=codec, weights_codec=codec)
        changes.append((f"sync.codec={codec}", other, COARSER if coarser else "and they are rounded less"))
    if 2 * sync.every <= MAX_EVERY:
        changes.insert(1, (f"sync.every={2 * sync.every}", replace(sync, every=2 * sync.every), MORE_OFTEN))
    if not sync.keeps_progress:
        how = "it keeps what is learned while a fragment is in flight, unlike the paper"
        changes.append(("sync.mixing=rebase", replace(sync, mixing="rebase"), how))
    if plan.schedule.fragments > 1:
        half = max(1, plan.schedule.fragments // 2)
        changes.append((f"sync.fragments={half}", replace(sync, fragments=half), "in larger bursts"))
    majority = (len(plan.islands) + 1) // 2
    if majority > sync.quorum:
        changes.append((f"sync.quorum={majority}", replace(sync, quorum=majority), "and merges hold more of them"))
    return changes


def _rounds(plan: Plan) -> float:
    return plan.run.train.tokens / (plan.prediction.tokens_per_s * plan.schedule.round_s)


def _alternative(plan: Plan, name: str, sync: SyncSettings, price: str, again: Again) -> Alternative:
    try:
        other = again(replace(plan.run, sync=sync))
    except InfeasibleError as error:
        return Alternative(name, 0.0, f"infeasible: {error.message}")
    if other.syncer.busy_percent > max(100, plan.syncer.busy_percent):
        return Alternative(name, 0.0, f"the syncer would be {other.syncer.busy_percent:.0f} % busy")
    rounds, now = _rounds(other), _rounds(plan)
    if rounds < FEWER * min(now, LEAST_ROUNDS):  # larger islands with longer steps set the round
        return Alternative(name, 0.0, f"the run would have {rounds:.0f} rounds, not {now:.0f}")
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
