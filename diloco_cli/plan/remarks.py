"""What a plan says of itself: its assumptions, each marked guessed, catalogue or measured; what to look at, and what to
change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from diloco_cli.config.codec import replace
from diloco_cli.config.devices import HOST_DEVICES, find_device
from diloco_cli.config.settings import Device, Inventory, IslandSettings, Link, RunSettings
from diloco_cli.errors import UsageError
from diloco_cli.plan.candidates import GUESSED_RESTART_S, Candidate, leaves_its_region, not_launched
from diloco_cli.plan.flow import MAX_EVERY, PER_DOUBLING, Fleet, max_overlap
from diloco_cli.plan.link import CLIENT_BPS, CODEC_BITS, Need, guessed_rtt_s, load_of_round
from diloco_cli.plan.memory import Fit
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.money import CLASS_A_PRICE, CLASS_B_PRICE, STORAGE_PRICE
from diloco_cli.plan.plan import Assumption, Mark, Schedule, SyncerNeeds
from diloco_cli.plan.speed import TERA, Precision, num_devices, peak_tflops, shares_cores
from diloco_cli.plan.syncer_pace import MERGE_PARAMETERS_PER_S, SYNCER_BPS, machine_of, spent_a_slot, work_of
from diloco_cli.protocol.rules.capacity import SlotTime, most_learners
from diloco_cli.protocol.rules.quorum import covering_slots
from diloco_cli.units import format_bandwidth, format_count, format_duration

MAX_NAMES = 6


def assumptions(
    run: RunSettings, kept: Sequence[Candidate], model: ModelFacts, inventory: Inventory, searched: bool
) -> tuple[Assumption, ...]:
    """Speeds first, then values that the inventory does not give, then assumptions of every plan."""
    islands = [candidate.island for candidate in kept]
    guesses = [*_of_the_inventory(kept, inventory), *_of_the_model(run, model)]
    guesses.append("memory: float32 weights, gradients and AdamW; a micro-batch a device at a time")
    guesses.append("islands fail independently of each other")
    if searched:
        guesses.append(f"the search takes a doubling of H beyond 50 to cost {100 * PER_DOUBLING:.0f} % of the tokens")
    guesses += _of_the_syncer(inventory)
    if any(island.price_per_h or island.egress_per_gb for island in islands):
        guesses.append(
            f"requests {1e6 * CLASS_A_PRICE:g} a million writes, {1e6 * CLASS_B_PRICE:g} a million reads;"
            f" storage {30 * STORAGE_PRICE:g} per GB and month"
        )
        abroad = [island for island in islands if leaves_its_region(island, inventory)]
        uncharged = "downloads out of the store's region are not charged here"
        guesses += _about((f"{uncharged}; the store's provider may (0.02 to 0.12 per GB)", abroad))
    merging = f"the syncer merges {format_count(MERGE_PARAMETERS_PER_S)} parameters of one learner a second"
    measured = Assumption(f"{merging} (diloco's merge benchmark: int8, one core of an AMD EPYC)", "measured")
    guessed = (Assumption(text, "guessed") for text in guesses)
    return (*_speeds(kept), *_sharing(kept, inventory), measured, *guessed)


def _speeds(kept: Sequence[Candidate]) -> list[Assumption]:
    """One line per island; islands with the same source share a line."""
    if len(kept) <= MAX_NAMES:
        return [candidate.assumption for candidate in kept]
    by_source: dict[tuple[str, str], list[str]] = {}
    for candidate in kept:
        name, assumption = candidate.island.name, candidate.assumption
        text = assumption.text.removeprefix(f"{name}: ")
        by_source.setdefault((text, assumption.mark), []).append(name)
    return [Assumption(f"{_names(names)}: {text}", mark) for (text, mark), names in by_source.items()]  # type: ignore[arg-type]


def _sharing(kept: Sequence[Candidate], inventory: Inventory) -> list[Assumption]:
    local = [candidate.island.name for candidate in kept if shares_cores(candidate.island, None)]
    if inventory.local is None and len(local) > 1:
        text = "planned as if each had cores of its own; measure this machine: diloco inventory probe -f RUN"
        return [Assumption(f"{_names(local)}: {text}", "guessed")]
    if inventory.local is None:
        return []
    by_share: dict[str, list[str]] = {}
    for candidate in kept:
        if candidate.share < 1:
            by_share.setdefault(f"{candidate.share:.2f}", []).append(candidate.island.name)
    mark: Mark = "measured" if inventory.local.crowding else "guessed"
    cores = f"share {inventory.local.cores} cores"
    return [Assumption(f"{_names(names)}: {cores}, speeds x {share}", mark) for share, names in by_share.items()]


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
        ("no link given, taken as fast enough", [i for i in islands if not (i.link.up_bps and i.link.down_bps)]),
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
    return [f"{_names([island.name for island in islands])}: {text}" for text, islands in guesses if islands]


def _names(names: Sequence[str]) -> str:
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"


YEAR_D = 365.0
DAY_S = 86_400.0
WEEK_D = 7.0
LONG_STEP_S = 60.0
GOOD_STEP_S = 10.0
FULL = 0.8  # a link used beyond this share of its capacity is worth a warning
LATE_STEP = 1.5  # a step longer than this many rounds makes its island miss merges
IDLE_ACCELERATORS = 0.9  # a batch that keeps a smaller share of them busy gets a warning
CROWDED = 80.0  # percent of a slot; a syncer that needs more gets a warning
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
    """Warnings about an implausible measured speed."""
    device = find_device(island.accelerators.name, inventory.devices)
    if device.name in HOST_DEVICES:
        return []
    if island.tokens_per_s:
        return _implausible(island, device, model, precision)
    return []


def _implausible(island: IslandSettings, device: Device, model: ModelFacts, precision: Precision) -> list[str]:
    """A measured speed above the peak, or above what even large matrix products reach of it."""
    try:
        tflops, kind = peak_tflops(device, precision)
    except UsageError:
        return []  # nothing to compare with
    most = device.achievable or 1.0
    mfu = (island.tokens_per_s or 0.0) * model.flops_per_token / (num_devices(island) * tflops * TERA)
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
    load = load_of_round(model, fleet.sync.codec, fleet.sync.weights_codec, run.train.inner)
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
    return warnings


def cold_start_warnings(fleet: Fleet, run: RunSettings) -> list[str]:
    """A warning about islands that stand idle in the first rounds."""
    rounds, kept = run.cold_start.rounds, sorted(fleet.kept, key=lambda c: (-c.tokens_per_s, c.island.name))
    if rounds == 0 or len(kept) < 2:
        return []
    idle = f"{len(kept) - 1} of {len(kept)} islands stand idle"
    return [f"cold start: {kept[0].island.name} alone for {rounds} rounds; {idle}"]


def syncer_warnings(needs: SyncerNeeds, fleet: Fleet, model: ModelFacts) -> list[str]:
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
    return [": ".join(filter(None, (head, "; or ".join(_ways(needs, fleet, model)))))]


def _ways(needs: SyncerNeeds, fleet: Fleet, model: ModelFacts) -> Iterator[str]:
    """Settings under which the syncer would be free for a fifth of each slot; what to change about its machine."""
    sync, s, machine, islands = fleet.sync, fleet.schedule, fleet.kept[0].syncer, len(fleet.kept)
    every = math.ceil(sync.every * needs.busy_percent / CROWDED)
    if every <= MAX_EVERY:
        yield f"--set sync.every={every}"
    fragments = _fewer_fragments(fleet, model) if needs.limit == "calls" else None
    if fragments is not None:
        yield f"--set sync.fragments={fragments}"
    smaller = min(CODEC_BITS, key=lambda codec: CODEC_BITS[codec])
    coded = replace(sync, codec=smaller)
    spent = spent_a_slot(model.parameters, s.fragments, islands, coded, machine, s.slot_s)
    if needs.limit == "bytes" and sync.codec != smaller and _leaves_room(spent, s.slot_s):
        yield f"--set sync.codec={smaller}"
    most = most_learners(work_of(model.parameters / s.fragments, islands, sync), machine, s.slot_s * CROWDED / 100)
    if 0 < most < islands:
        yield f"at most {most} islands"
    if needs.limit == "calls":
        yield f"a syncer nearer to its bucket than {format_duration(machine.call_s)} a call (store.link.rtt)"
    elif needs.limit == "bytes" and min(machine.up_bps or math.inf, machine.down_bps or math.inf) < CLIENT_BPS:
        yield "a faster link of the syncer's machine (store.link)"


def _leaves_room(spent: SlotTime, slot_s: float) -> bool:
    return 100 * spent.seconds <= CROWDED * slot_s


def _fewer_fragments(fleet: Fleet, model: ModelFacts) -> int | None:
    """The largest number of fragments whose slots leave the syncer a fifth of them."""
    s, sync, islands, machine = fleet.schedule, fleet.sync, len(fleet.kept), fleet.kept[0].syncer
    for count in range(s.fragments - 1, 0, -1):
        slot_s = s.round_s / count
        spent = spent_a_slot(model.parameters, count, islands, sync, machine, slot_s)
        if _leaves_room(spent, slot_s):
            return count
    return None
