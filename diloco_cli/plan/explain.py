"""Every number of a plan with its formula and its inputs: `diloco plan --explain`.

`numbers` is arithmetic that can be evaluated (with max, min, round, ceil); it gives `value`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from diloco_cli.config.devices import HOST_DEVICES, find_device
from diloco_cli.config.settings import SyncSettings
from diloco_cli.methods import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from diloco_cli.plan import goodput, link, memory, money, speed
from diloco_cli.plan.candidates import Candidate, candidates
from diloco_cli.plan.flow import KEEPS_IN_FLIGHT, MAX_IN_FLIGHT, Fleet, Flow, run_fleet
from diloco_cli.plan.link import CODEC_BITS, moment_bytes
from diloco_cli.plan.plan import Plan, PlannedIsland
from diloco_cli.plan.speed import default_mfu, host_gflops, num_devices, peak_tflops
from diloco_cli.plan.syncer_pace import MERGE_PARAMETERS_PER_S, STATE_BYTES, kept_at_pace, merged_rounds
from diloco_cli.protocol.actors.collection import KEPT_MOMENTS
from diloco_cli.protocol.log.together import MAX_BYTES_AT_ONCE
from diloco_cli.protocol.rules.capacity import SyncerMachine, calls_of_merge
from diloco_cli.protocol.rules.polling import requests_every_s, watch_every_s


@dataclass(frozen=True)
class Explanation:
    """One number. `of`: what it belongs to, such as "model" or an island's name; `numbers` may be empty."""

    of: str
    name: str
    formula: str
    numbers: str
    value: float
    unit: str = ""


def short(value: float) -> str:
    """Short enough to read, exact enough to compute with: 1e+09 as 1e9."""
    text = f"{value:.6g}"
    return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def merging_formula(reads_back: bool) -> str:
    read = "(deltas + version)" if reads_back else "deltas"
    per_parameter = f"islands / parameters merged a second + {read} / syncer's download + version / its upload"
    return f"fragment x ({per_parameter}) + calls in turn x a call"


def merging_numbers(parameters: float, num_islands: int, sync: SyncSettings, machine: SyncerMachine) -> str:
    """The syncer's time for a fragment of `parameters` parameters. A version: state and weights."""
    version = f"({8 * STATE_BYTES} + {CODEC_BITS[sync.weights_codec]:g})"
    deltas = f"{num_islands} * {CODEC_BITS[sync.codec]:g}"
    read_bits = f"({deltas} + {version})" if machine.reads_back else deltas
    read = f"{read_bits} / {short(machine.down_bps or math.inf)}"
    written = f"{version} / {short(machine.up_bps or math.inf)}"
    merged = f"{num_islands} / {short(machine.parameters_per_s)}"
    calls = f"{calls_of_merge(num_islands, machine)} * {short(machine.call_s)}"
    return f"{short(parameters)} * ({merged} + {read} + {written}) + {calls}"


def waiting_numbers(plan: Plan) -> str:
    """How long an offer waits at the syncer for its slot."""
    spent, slot = short(plan.syncer.fastest_slot_s), short(plan.schedule.slot_s)
    return f"min(1, {spent} / {slot}) * max({slot}, {spent})"


def explain_island(
    plan: Plan, island: PlannedIsland, candidate: Candidate, flow: Flow, num_islands: int
) -> Iterator[Explanation]:
    say, round_s, step = partial(Explanation, island.name), short(plan.schedule.round_s), short(island.step_s)
    yield _speed(plan, candidate)
    yield from _share(plan, candidate)
    numbers = f"{island.batch_tokens} / {short(island.tokens_per_s)}"
    yield say("step", "batch / (tokens/s)", numbers, island.step_s, "s")
    steps = float(flow.local_steps)
    yield say("H_i", "max(1, round(T / step))", f"max(1, round({round_s} / {step}))", steps, "steps")
    numbers = f"100 * max(0, 1 - {flow.local_steps} * {step} / {round_s})"
    yield say("idle", "1 - H_i x step / T", numbers, island.idle_percent, "%")
    yield from _link(plan, island, num_islands)
    yield from _exchange(plan, candidate, flow, num_islands)
    yield from _memory(plan, island, candidate)
    yield _host_memory(plan, island)
    mtbf_s = candidate.island.mtbf_s
    if mtbf_s is not None:
        numbers = f"{short(mtbf_s)} / ({short(mtbf_s)} + {short(goodput.restart_s(candidate.island))})"
        yield say("availability", "MTBF / (MTBF + restart)", numbers, island.availability)
    yield _predicted(plan, island, candidate, flow)


def _speed(plan: Plan, candidate: Candidate) -> Explanation:
    """Measured, or peak x MFU over FLOPs per token; then the factors that slow it."""
    island, m = candidate.island, plan.model
    device = find_device(island.accelerators.name, plan.inventory.devices)
    slower = "".join(
        f" {sign} {short(factor)}"
        for sign, factor in (
            ("/", island.slowdown),
            ("*", candidate.busy),
            ("*", candidate.share),
            ("*", candidate.recomputing),
        )
        if factor != 1
    )
    if island.tokens_per_s:
        formula, numbers = "as measured", short(island.tokens_per_s)
    elif device.name in HOST_DEVICES:
        numbers = f"{num_devices(island)} * {short(host_gflops(device.name, m))} * 1e9 / {short(m.flops_per_token)}"
        formula = "cores x GFLOP/s / FLOPs per token"
    else:
        tflops, mfu = peak_tflops(device, plan.run.train.precision)[0], island.mfu or default_mfu(device)
        numbers = f"{num_devices(island)} * {tflops:g} * 1e12 * {mfu:g} / {short(m.flops_per_token)}"
        formula = "n x peak x MFU / FLOPs per token"
    if slower:
        formula += " (slowdown, idle accelerators, shared cores, checkpointing)"
    return Explanation(island.name, "tokens/s", formula, numbers + slower, candidate.tokens_per_s, "tokens/s")


def _share(plan: Plan, candidate: Candidate) -> Iterator[Explanation]:
    """The share that other islands on the same cores leave, over all states of the machine with this island awake."""
    local = plan.inventory.local
    if local is None or not speed.shares_cores(candidate.island, None):
        return
    here = [other for other in plan.inventory.islands if speed.shares_cores(other, None)]
    states = speed.states_of(candidate.island, here, local, speed.SERVICE_CORES)
    numbers = " + ".join(f"{short(probability)} * {short(speed)}" for probability, speed in states)
    formula = "mean over which other islands are awake of seat x crowding x what the run's services leave"
    yield Explanation(candidate.island.name, "shared cores", formula, numbers, candidate.share, "")


def _link(plan: Plan, island: PlannedIsland, num_islands: int) -> Iterator[Explanation]:
    """The bandwidth that a round needs, and the link's true traffic: fragments, moments, records."""
    say, s, sync = partial(Explanation, island.name), plan.schedule, plan.run.sync
    total, longest = short(plan.model.parameters), short(max(s.round_s, island.step_s))
    up, down = CODEC_BITS[sync.codec], CODEC_BITS[sync.weights_codec]
    for way, codec, bits, needed in (
        ("up", sync.codec, up, island.up_mbps_needed),
        ("down", sync.weights_codec, down, island.down_mbps_needed),
    ):
        numbers = f"{total} * {bits:g} / {longest} / 1e6"
        yield say(f"{way}link needed", f"N x bits of {codec} / max(T, step)", numbers, needed, "Mbps")
    each = link.moment_bytes(plan.run.train.inner)
    moments = f" + 8 * {short(each)}" if each else ""
    offers = f"8 * {s.fragments} * {link.OFFER_BYTES} / {longest}"
    heartbeats = f"8 * {link.HEARTBEAT_BYTES} / {link.HEARTBEAT_EVERY_S:g}"
    formula = "N x (bits + bits of moments / rounds between their saves) / max(T, step) + offers + heartbeats"
    numbers = f"({total} * ({up:g}{moments}) / {longest} + {offers} + {heartbeats}) / 1e6"
    yield say("sent", formula, numbers, island.sent_mbps, "Mbps")
    commits = f"8 * ({link.COMMIT_BYTES} + {num_islands} * {link.INPUT_BYTES}) / {short(s.slot_s)}"
    formula = "N x bits / max(T, step) + a commit a slot, with an input of every island"
    numbers = f"({total} * {down:g} / {longest} + {commits}) / 1e6"
    yield say("received", formula, numbers, island.received_mbps, "Mbps")


def _exchange(plan: Plan, candidate: Candidate, flow: Flow, num_islands: int) -> Iterator[Explanation]:
    """The exchange of the largest fragment, and of the fragment in which a parameter lies on average."""
    say, s, sync = partial(Explanation, candidate.island.name), plan.schedule, plan.run.sync
    numbers = _transfer_numbers(candidate, s.fragment_parameters, sync)
    formula = "largest fragment x bits / bandwidth, up and down, + round trips"
    yield say("transfer", formula, numbers, flow.transfer_s, "s")
    if sync.adoption == "at_tau":
        served = max(s.slot_s, plan.syncer.fastest_slot_s)
        numbers = f"{s.overlap} * {short(served)}"
        yield say("in flight", "overlap x slot: an island adopts then, not before", numbers, flow.in_flight_s, "s")
        return
    mean = link.fragments_of(sync, plan.model).mean
    merging = merging_numbers(mean, num_islands, sync, candidate.syncer)
    numbers = f"{_transfer_numbers(candidate, mean, sync)} + {short(s.quorum_s)} + {waiting_numbers(plan)} + {merging}"
    yield say("in flight", "transfer of the mean fragment + quorum + waiting + merging", numbers, flow.in_flight_s, "s")


def _transfer_numbers(candidate: Candidate, parameters: float, sync: SyncSettings) -> str:
    own = candidate.link
    parts = [
        f"{short(parameters)} * {CODEC_BITS[codec]:g} / {short(bps)}"
        for codec, bps in ((sync.codec, own.up_bps), (sync.weights_codec, own.down_bps))
        if bps
    ]
    return " + ".join([*parts, f"{link.ROUND_TRIPS} * {short(candidate.rtt_s)}"])


def _memory(plan: Plan, island: PlannedIsland, candidate: Candidate) -> Iterator[Explanation]:
    m, fit, of = plan.model, candidate.fit, candidate.island.name
    tokens = f"{fit.sequences} * {m.sequence}"
    yield _micro_batch(plan, candidate, tokens)
    over = f" / {fit.ranks}" if fit.sharding == "fsdp" else ""
    accelerators, overlap = candidate.island.accelerators, plan.schedule.overlap
    how = memory.how_on(accelerators, plan.run, plan.inventory, m, overlap)
    layer = memory.layer_bytes(m, how)
    kept = (f"{layer:g} B S d (L + 1/2)", f"{layer:g} * {tokens} * {m.width} * ({m.layers} + 0.5) / 1e9")
    freed, freed_numbers = "12 S V", f"12 * {m.sequence} * {short(m.vocabulary)}"
    if how.checkpointing:
        again, logits = f"1.5 * {layer:g} * {m.width}", f"12 * {short(m.vocabulary)}"
        kept = (
            f"(4 L d + max(0, 3/2 {layer:g} d - 12 V)) B S",
            f"(4 * {m.layers} * {m.width} + max(0, {again} - {logits})) * {tokens} / 1e9",
        )
        freed = f"max(0, 12 V - 3/2 {layer:g} d) S"
        freed_numbers = f"max(0, {logits} - {again}) * {m.sequence}"
    largest, each = short(m.max_fragment(how.num_fragments)), short(m.parameters / how.num_fragments)
    e, g = short(m.embedding_parameters), how.gathered
    rest = f"4 * {e} + {g} * ({short(m.parameters)} - {e}) / {m.layers} - {freed_numbers}"
    known = {
        "weights": ("4 N", f"{memory.WEIGHT_BYTES} * {short(m.parameters)}{over} / 1e9"),
        "gradients": ("4 N", f"{memory.GRADIENT_BYTES} * {short(m.parameters)}{over} / 1e9"),
        "moments": (f"{how.moment_bytes} N", f"{how.moment_bytes} * {short(m.parameters)}{over} / 1e9"),
        "casts": ("2 N", f"{memory.CAST_BYTES} * {short(m.parameters)} / 1e9"),
        "activations": kept,
        "logits": ("12 B S V", f"{memory.LOGIT_BYTES} * {tokens} * {short(m.vocabulary)} / 1e9"),
        "gathered": (f"4 E + max(0, 4 E + g (N - E) / L - {freed})", f"(4 * {e} + max(0, {rest})) / 1e9"),
        "exchange": (
            f"4 (m + {overlap} min(m, N / P)) + {4 * how.arriving} m, m: the largest fragment",
            f"4 * ({largest} + {overlap} * min({largest}, {each}) + {how.arriving} * {largest}) / 1e9",
        ),
    }
    for part in island.memory_parts:
        formula, numbers = known[part.name]
        yield Explanation(of, f"memory, {part.name}", formula, numbers, part.gb, "GB")
    sizes = " + ".join(short(part.gb) for part in island.memory_parts)
    yield Explanation(
        of, "memory", f"the sum, on each accelerator ({fit.shards})", sizes, island.memory_gb_needed, "GB"
    )


def _micro_batch(plan: Plan, candidate: Candidate, tokens: str) -> Explanation:
    """B sequences of S tokens: the micro-batch of one forward and backward pass on one device."""
    formula = "B x S, as train.micro_batch_tokens says, at most the device's part of a batch"
    if plan.run.train.micro_batch_tokens == "auto":
        margin = f"activations and logits counted {memory.WORKING_MARGIN:g}-fold"
        room = f"{100 * memory.USABLE:g} % of its memory hold, {margin}"
        if candidate.fit.available_gb is None:
            room = f"{1000 * memory.HOST_WORKING_GB:g} MB hold of activations and logits"
        formula = f"B x S; B: the device's part of a batch, or the largest power of two that {room}"
    value = candidate.fit.sequences * plan.model.sequence
    return Explanation(candidate.island.name, "micro-batch", formula, tokens, value, "tokens")


def _host_memory(plan: Plan, island: PlannedIsland) -> Explanation:
    s, sync, saved = plan.schedule, plan.run.sync, INNER_OPTIMIZERS[plan.run.train.inner.name].state_bytes > 0
    up, down = CODEC_BITS[sync.codec], CODEC_BITS[sync.weights_codec]
    in_flight = f"(({s.overlap} + 1) * (4 + 4 + {up:g} / 8) + 4 + {down:g} / 8) * {short(s.fragment_parameters)}"
    whole = f"{memory.host_bytes(sync, saved)} * {short(plan.model.parameters)}"
    kept = "4 N adopted + 16 N while moments are saved" if saved else "4 N adopted"
    kept += " + 8 N of rounding errors" if sync.error_feedback else ""
    formula = f"{kept} + (overlap + 1) x (sent + delta + payload) + one arrival"
    numbers = f"({whole} + {in_flight}) / 1e9"
    return Explanation(island.name, "host memory", formula, numbers, island.host_memory_gb_needed, "GB")


def _predicted(plan: Plan, island: PlannedIsland, candidate: Candidate, flow: Flow) -> Explanation:
    s, sync, mtbf_s = plan.schedule, plan.run.sync, candidate.island.mtbf_s
    load = plan.syncer.fastest_slot_s / s.slot_s
    slot_s, served_s = max(1.0, load) * s.slot_s, max(1.0, load) * s.round_s
    exchange, hidden = flow.transfer_s + s.quorum_s + s.merge_s, s.overlap * slot_s
    parts = [
        (short(island.tokens_per_s), "tokens/s"),
        (f"min(1, {flow.local_steps} * {short(island.step_s)} / {short(s.round_s)})", "in time"),
        (f"{short(slot_s)} / ({short(slot_s)} + max(0, {short(exchange)} - {short(hidden)}))", "busy"),
    ]
    if sync.mixing not in KEEPS_IN_FLIGHT:
        kept = f"(1 - {short(flow.in_flight_s)} / {short(served_s)})"
        if flow.in_flight_s / served_s > MAX_IN_FLIGHT:
            kept = f"{1 - MAX_IN_FLIGHT} * {MAX_IN_FLIGHT} * {short(served_s)} / {short(flow.in_flight_s)}"
        parts.append((kept, "not in flight"))
    if kept_at_pace(sync, load) < 1:
        parts.append((f"{merged_rounds(sync):g} / {short(load)}", "at the syncer's pace"))
    if mtbf_s is not None:
        at_risk = served_s / 2 + hidden
        parts.append((short(candidate.availability), "availability"))
        parts.append((f"{short(mtbf_s)} / ({short(mtbf_s)} + {short(at_risk)})", "kept"))
    if flow.moving < 1:
        parts.append((short(flow.moving), "moving"))
    formula = " x ".join(text for _, text in parts)
    numbers = " * ".join(number for number, _ in parts)
    return Explanation(island.name, "predicted", formula, numbers, island.predicted_tokens_per_s, "tokens/s")


MAX_WRITTEN = 12  # islands up to which sums and products over all of them are written out


def explain(plan: Plan) -> tuple[Explanation, ...]:
    """The model, the schedule, then the islands, the prediction, the money."""
    by_name = {c.island.name: c for c in candidates(plan.run, plan.inventory, plan.model)}
    kept = sorted((by_name[i.name] for i in plan.islands), key=lambda c: (c.step_s, c.island.name))
    fleet = run_fleet(kept, plan.run.sync, plan.model)
    flows = {c.island.name: flow for c, flow in zip(fleet.kept, fleet.flows, strict=True)}
    found = [*_model(plan), *_schedule(plan, fleet)]
    for island in plan.islands:
        found += explain_island(plan, island, by_name[island.name], flows[island.name], len(kept))
    return (*found, *_prediction(plan, fleet), *_syncer(plan), *_money(plan), *_mirrors(plan, fleet), *_bills(plan))


def _model(plan: Plan) -> Iterator[Explanation]:
    m, count, say = plan.model, plan.schedule.fragments, partial(Explanation, "model")
    active = m.parameters - m.idle_parameters
    numbers = f"6 * {short(active)} + 12 * {m.layers} * {m.width} * {m.sequence}"
    yield say("FLOPs per token", "6 N + 12 L d S", numbers, m.flops_per_token)
    numbers = f"{short(m.parameters)} / {count}"
    if count > 1 and not plan.run.sync.split_rows:
        embeddings = int(m.embedding_parameters > 0)
        rest = f"({short(m.parameters)} - {short(m.embedding_parameters)}) / {count - embeddings}"
        numbers = f"max({short(m.embedding_parameters)}, {rest})"
    largest = plan.schedule.fragment_parameters
    yield say("largest fragment", "max(embedding, the rest / others)", numbers, largest, "parameters")


def _schedule(plan: Plan, fleet: Fleet) -> Iterator[Explanation]:
    s, sync, say = plan.schedule, plan.run.sync, partial(Explanation, "schedule")
    slot, exchange = short(s.slot_s), short(s.exchange_s)
    yield say("round T", "H x the fastest step", f"{s.sync_every} * {short(fleet.kept[0].step_s)}", s.round_s, "s")
    yield say("slot", "T / fragments", f"{short(s.round_s)} / {s.fragments}", s.slot_s, "s")
    numbers = merging_numbers(s.fragment_parameters, len(fleet.kept), sync, fleet.kept[0].syncer)
    yield say("merging", merging_formula(plan.syncer.reads_back), numbers, s.merge_s, "s")
    transfer = max(flow.transfer_s for flow in fleet.flows)
    numbers = f"{short(transfer)} + {short(s.quorum_s)} + {short(s.merge_s)}"
    yield say("exchange", "slowest transfer + quorum + merging", numbers, s.exchange_s, "s")
    if sync.overlap == "auto":
        numbers = f"min(ceil({exchange} / {slot}) + 1, max(1, {s.fragments} - 1))"
        yield say("overlap", "min(ceil(exchange / slot) + 1, fragments - 1)", numbers, float(s.overlap), "slots")
    yield say("slack", "overlap x slot - exchange", f"{s.overlap} * {slot} - {exchange}", s.slack_s, "s")
    numbers = f"min(max(0, {sync.grace.gamma:g} * {short(s.slack_s)}), {slot})"
    yield say("grace", "min(gamma x slack, slot), not below 0", numbers, s.grace_s, "s")


def _prediction(plan: Plan, fleet: Fleet) -> Iterator[Explanation]:
    p, say = plan.prediction, partial(Explanation, "prediction")
    availabilities, quorum = [candidate.availability for candidate in fleet.kept], plan.schedule.quorum
    away = " * ".join(f"(1 - {short(a)})" for a in availabilities)
    here = " * ".join(map(short, availabilities))
    enough = f"1 - {away}" if quorum == 1 else here if quorum == len(availabilities) else ""
    sums = " + ".join(short(island.predicted_tokens_per_s) for island in plan.islands)
    if len(availabilities) > MAX_WRITTEN:
        enough = here = sums = ""
    yield say(f"P(at least {quorum})", "Poisson-binomial over availabilities", enough, p.quorum_probability)
    yield say("P(all)", "product of availabilities", here, p.all_present_probability)
    yield say("tokens/s", "sum of the islands' predictions", sums, p.tokens_per_s, "tokens/s")
    yield say("goodput", "tokens/s / ideal", f"{short(p.tokens_per_s)} / {short(p.tokens_per_s_ideal)}", p.goodput)
    days = f"{short(plan.run.train.tokens)} / {short(p.tokens_per_s)} / 86400"
    yield say("time to the target", "tokens / (tokens/s)", days, p.days_to_target, "d")
    formula = "batch / (compute + max(0, all-reduce - 2/3 compute)) x P(all)"
    yield say("synchronous", formula, _synchronous(plan, fleet), p.synchronous_tokens_per_s, "tokens/s")


def _synchronous(plan: Plan, fleet: Fleet) -> str:
    """Data-parallel: a step is the compute plus the part of the all-reduce that the backward pass cannot hide."""
    batch, count = sum(c.batch_tokens for c in fleet.kept), len(fleet.kept)
    compute = f"{batch} / {short(sum(c.tokens_per_s for c in fleet.kept))}"
    known = [bps for c in fleet.kept for bps in (c.island.link.up_bps, c.island.link.down_bps) if bps is not None]
    reduce = "0"
    if count > 1 and known:
        reduce = f"2 * {count - 1} / {count} * {short(plan.model.parameters)} * 16 / {short(min(known))}"
    step = f"({compute} + max(0, {reduce} - 2 / 3 * {compute}))"
    return f"{batch} / {step} * {short(plan.prediction.all_present_probability)}"


def _served_s(plan: Plan) -> float:
    """From merge to merge: a slot as planned, or as the syncer can."""
    return max(plan.schedule.slot_s, plan.syncer.fastest_slot_s)


def _syncer(plan: Plan) -> Iterator[Explanation]:
    s, needs, sync, say = plan.schedule, plan.syncer, plan.run.sync, partial(Explanation, "syncer")
    total, count, round_s = short(plan.model.parameters), len(plan.islands), short(_served_s(plan) * s.fragments)
    up, down = CODEC_BITS[sync.codec], CODEC_BITS[sync.weights_codec]
    largest = short(s.fragment_parameters)
    payload = f"{up:g} / 8 * {largest}"
    coming = f"max({payload}, min({count} * {payload}, {MAX_BYTES_AT_ONCE}))"
    copies, formula_of_copies = (2, "2 x ") if needs.reads_back else (1, "")
    numbers = f"(8 * {total} + {copies} * (8 + {down:g} / 8) * {largest} + {coming} + 64e6) / 1e9"
    formula = (
        f"8 N + {formula_of_copies}(next version + weights) of the largest fragment + payloads on their way + 64 MB"
    )
    yield say("memory", formula, numbers, needs.memory_gb, "GB")
    state = f"64 * {total} + {total} * {down:g}"
    numbers, formula = f"{count} * {total} * {up:g} / {round_s} / 1e6", "islands x delta / T"
    if needs.reads_back:
        numbers = f"({count} * {total} * {up:g} + {state}) / {round_s} / 1e6"
        formula = "(islands x delta + state + weights) / T: every delta, and both read back"
    yield say("down", formula, numbers, needs.down_mbps, "Mbps")
    yield say("up", "(state + weights) / T", f"({state}) / {round_s} / 1e6", needs.up_mbps, "Mbps")
    numbers = f"100 * {total} * {count} / {short(MERGE_PARAMETERS_PER_S)} / {round_s}"
    yield say("merging", "N x islands / parameters merged a second / T", numbers, needs.merge_percent, "%")
    formula = "calls in turn, with those made now and then, + bytes over its link + merging"
    numbers = " + ".join(map(short, (needs.calls_s, needs.bytes_s, needs.processor_s)))
    yield say("shortest slot", formula, numbers, needs.fastest_slot_s, "s")
    numbers = f"100 * {short(needs.fastest_slot_s)} / {short(s.slot_s)}"
    yield say("busy", "shortest slot / slot", numbers, needs.busy_percent, "%")


def _money(plan: Plan) -> Iterator[Explanation]:
    c, s, sync, inner = plan.money, plan.schedule, plan.run.sync, plan.run.train.inner
    slot_s = _served_s(plan)
    total, count, slot = short(plan.model.parameters), len(plan.islands), short(slot_s)
    say = partial(Explanation, "money")
    a_day = f"/ 1e9 * 86400 / {short(slot_s * s.fragments)}"
    sent = f"({CODEC_BITS[sync.codec] / 8:g} + {short(moment_bytes(inner))})"
    formula = "islands x N x (bytes + moments / rounds between their saves) / T"
    yield say("egress", formula, f"{count} * {total} * {sent} {a_day}", c.egress_gb_per_day, "GB/day")
    saves = f"{count} / ({inner.save_every} * {s.fragments})"
    numbers = f"((2 * {count} + 3 + 1 / {money.SNAPSHOT_EVERY} + {saves}) / {slot} + ({count} + 1) / 3) * 86400"
    formula = "(2 M + 3 + snapshots + saves) / slot + (M + 1) / heartbeat"
    yield say("class A requests", formula, numbers, c.class_a_per_day, "/day")
    watch_s = watch_every_s(slot_s)
    fence, watch, requests = map(short, (max(money.FENCE_EVERY_S, watch_s), watch_s, requests_every_s(slot_s)))
    learners, syncers = (short(money.looks_per_s(slot_s, n)) for n in (money.LEARNERS_LOOKS, money.SYNCERS_LOOKS))
    read_back = (f" + 2 / {slot}", " + 2 / slot") if plan.syncer.reads_back else ("", "")
    numbers = (
        f"({count} * ({learners} + 1 / {slot} + 1 / {fence}) + {count} * ({syncers} + 1 / {slot}){read_back[0]}"
        f" + {count} / {watch} + 2 / {requests}) * 86400"
    )
    formula = (
        f"M (looks for commits + 1 / slot + 1 / fence) + M (looks into a mailbox + 1 / slot){read_back[1]}"
        " + M / watch + 2 / requests"
    )
    yield say("class B requests", formula, numbers, c.class_b_per_day, "/day")
    version = f"{OUTER_OPTIMIZERS[plan.run.outer.name].state_bytes} + {CODEC_BITS[sync.weights_codec] / 8:g}"
    numbers = f"{total} * ({version} + {count} * {sent}) {a_day}"
    formula = "N x (state + weights + M x (delta + moments)) / T, until the retained rounds are full"
    yield say("storage", formula, numbers, c.storage_gb_per_day, "GB/day")


def _mirrors(plan: Plan, fleet: Fleet) -> Iterator[Explanation]:
    """The traffic between the home bucket and those of regions; empty if there are none."""
    crossings = [kept.crossing for kept in fleet.kept if kept.crossing is not None]
    if not crossings:
        return
    c, say = plan.money, partial(Explanation, "money")
    up, down = CODEC_BITS[plan.run.sync.codec] / 8, CODEC_BITS[plan.run.sync.weights_codec] / 8
    regions = {crossing.region: crossing.home_per_gb for crossing in crossings}
    a_day = f"{short(plan.model.parameters)} / 1e9 * 86400 / {short(_served_s(plan) * plan.schedule.fragments)}"
    numbers = f"({len(regions)} * {down:g} + {len(crossings)} * {up:g}) * {a_day}"
    formula = "N x (regions x version + their islands x delta) / T"
    yield say("between buckets", formula, numbers, c.mirrors_gb_per_day, "GB/day")
    prices, home = sum(crossing.per_gb for crossing in crossings), sum(regions.values())
    numbers = f"({down:g} * {short(home)} + {up:g} * {short(prices)}) * {a_day}"
    formula = "N x (version x home's prices + delta x regions' prices) / T"
    yield say("egress of mirrors", formula, numbers, c.mirrors_per_day, "/day")


def _bills(plan: Plan) -> Iterator[Explanation]:
    """The costs until the target is reached."""
    c, s, say = plan.money, plan.schedule, partial(Explanation, "money")
    slot_s = _served_s(plan)
    days, growth = short(plan.prediction.days_to_target), short(c.storage_gb_per_day)
    grows = short(min(plan.prediction.days_to_target, money.retained_days(slot_s, s.fragments, plan.run)))
    numbers = " + ".join(
        f"{short(count)} * {short(price)}"
        for count, price in ((c.class_a_per_day, money.CLASS_A_PRICE), (c.class_b_per_day, money.CLASS_B_PRICE))
    )
    yield say("requests", "class A x price + class B x price", numbers, c.requests_per_day, "/day")
    formula = "growth x min(days, days that are retained)"
    yield say("storage at the end", formula, f"{growth} * {grows}", c.storage_gb_at_end, "GB")
    commits = min(
        plan.prediction.days_to_target * money.DAY_S / slot_s, money.retained_commits(slot_s, s.fragments, plan.run)
    )
    count, versions = len(plan.islands), plan.run.sync.staleness_rounds + 3
    numbers = f"{short(commits)} * (2 * {count} + 2) + {s.fragments} * {versions} + {count} * {KEPT_MOMENTS}"
    formula = "commits that are retained x (2 M + 2) + P x (staleness + 3) + M x saved moments"
    yield say("objects kept", formula, numbers, c.objects_kept)
    numbers = f"{growth} * {grows} * ({days} - {grows} / 2) * {short(money.STORAGE_PRICE)}"
    formula = "growth x g x (days - g / 2) x price of a GB and day, g = min(days, days that are retained)"
    yield say("storage in all", formula, numbers, c.storage_total)
    yield say("per hour", "money in all / days / 24", f"{short(c.total)} / {days} / 24", c.per_h, "/h")
    a_day = [f"24 * {short(c.accelerators_per_h)}", short(c.egress_per_day), short(c.requests_per_day)]
    if c.mirrors_per_day:
        a_day.insert(2, short(c.mirrors_per_day))
    formula = f"days x (24 x price + egress{' + mirrors' if c.mirrors_per_day else ''} + requests) + storage"
    yield say("money in all", formula, f"{days} * ({' + '.join(a_day)}) + {short(c.storage_total)}", c.total)
