"""Every number of a plan with its formula and its inputs: `diloco plan --explain`.

`numbers` is arithmetic that can be evaluated (with max, min, round, ceil); it gives `value`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from diloco_cli.plan import money
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.explain_island import Explanation, explain_island, merging_formula, merging_numbers, short
from diloco_cli.plan.flow import Fleet, run_fleet
from diloco_cli.plan.link import CODEC_BITS, moment_bytes
from diloco_cli.plan.plan import Plan
from diloco_cli.plan.syncer_pace import MERGE_PARAMETERS_PER_S
from diloco_cli.protocol.actors.collection import KEPT_MOMENTS
from diloco_cli.protocol.log.together import MAX_BYTES_AT_ONCE
from diloco_cli.protocol.rules.polling import requests_every_s, watch_every_s

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
    numbers = f"{total} * ({money.STATE_BYTES} + {CODEC_BITS[sync.weights_codec] / 8:g} + {count} * {sent}) {a_day}"
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
