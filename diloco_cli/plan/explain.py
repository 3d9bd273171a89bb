"""Every number of a plan with its formula and its inputs: `diloco plan --explain`.

`numbers` is arithmetic that can be evaluated as it stands (with max, min, round, ceil); it gives `value` again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diloco_cli.plan import money
from diloco_cli.plan.candidates import candidates
from diloco_cli.plan.explain_island import MERGING, Explanation, explain_island, merging_numbers, short
from diloco_cli.plan.flow import Fleet, run_fleet
from diloco_cli.plan.link import CODEC_BITS, moment_bytes
from diloco_cli.plan.plan import Plan
from diloco_cli.plan.schedule import MERGE_PARAMETERS_PER_S
from diloco_cli.protocol.polling import requests_every_s, watch_every_s


def explain(plan: Plan, most_islands: int | None = None) -> tuple[Explanation, ...]:
    """The model, the schedule, then the islands (at most so many), the prediction, the money."""
    by_name = {c.island.name: c for c in candidates(plan.run, plan.inventory, plan.model)}
    kept = sorted((by_name[i.name] for i in plan.islands), key=lambda c: (c.step_s, c.island.name))
    fleet = run_fleet(kept, plan.run.sync, plan.model)
    flows = {c.island.name: flow for c, flow in zip(fleet.kept, fleet.flows, strict=True)}
    found = [*_model(plan), *_schedule(plan, fleet)]
    for island in plan.islands[:most_islands]:
        found += explain_island(plan, island, by_name[island.name], flows[island.name], fleet)
    return (*found, *_prediction(plan, fleet), *_syncer(plan), *_money(plan), *_mirrors(plan, fleet), *_bills(plan))


def _model(plan: Plan) -> Iterator[Explanation]:
    m, count = plan.model, plan.schedule.fragments
    active = m.parameters - m.idle_parameters
    numbers = f"6 * {short(active)} + 12 * {m.layers} * {m.width} * {m.sequence}"
    yield Explanation("model", "FLOPs per token", "6 N + 12 L d S", numbers, m.flops_per_token, "")
    numbers = f"{short(m.parameters)} / {count}"
    if count > 1 and not plan.run.sync.split_rows:
        embeddings = int(m.embedding_parameters > 0)
        rest = f"({short(m.parameters)} - {short(m.embedding_parameters)}) / {count - embeddings}"
        numbers = f"max({short(m.embedding_parameters)}, {rest})"
    largest = plan.schedule.fragment_parameters
    yield Explanation("model", "largest fragment", "max(embedding, the rest / others)", numbers, largest, "parameters")


def _schedule(plan: Plan, fleet: Fleet) -> Iterator[Explanation]:
    s, sync = plan.schedule, plan.run.sync
    fastest, slot, exchange = fleet.kept[0].step_s, short(s.slot_s), short(s.exchange_s)
    transfer = max(flow.transfer_s for flow in fleet.flows)
    rows = [
        ("round T", "H x the fastest step", f"{s.sync_every} * {short(fastest)}", s.round_s, "s"),
        ("slot", "T / fragments", f"{short(s.round_s)} / {s.fragments}", s.slot_s, "s"),
        (
            "merging",
            MERGING,
            merging_numbers(s.fragment_parameters, len(fleet.kept), sync),
            s.merge_s,
            "s",
        ),
        (
            "exchange",
            "slowest transfer + quorum + merging",
            f"{short(transfer)} + {short(s.quorum_s)} + {short(s.merge_s)}",
            s.exchange_s,
            "s",
        ),
    ]
    if sync.overlap == "auto":
        numbers = f"min(ceil({exchange} / {slot}) + 1, max(1, {s.fragments} - 1))"
        rows.append(("overlap", "min(ceil(exchange / slot) + 1, fragments - 1)", numbers, float(s.overlap), "slots"))
    grace = f"min(max(0, {sync.grace.gamma:g} * {short(s.slack_s)}), {slot})"
    rows += [
        ("slack", "overlap x slot - exchange", f"{s.overlap} * {slot} - {exchange}", s.slack_s, "s"),
        ("grace", "min(gamma x slack, slot), not below 0", grace, s.grace_s, "s"),
    ]
    yield from (Explanation("schedule", *row) for row in rows)


def _prediction(plan: Plan, fleet: Fleet) -> Iterator[Explanation]:
    p, availabilities = plan.prediction, [candidate.availability for candidate in fleet.kept]
    away = " * ".join(f"(1 - {short(a)})" for a in availabilities)
    here = " * ".join(map(short, availabilities))
    quorum = plan.schedule.quorum
    numbers = f"1 - {away}" if quorum == 1 else here if quorum == len(availabilities) else ""
    few = len(availabilities) <= 12
    yield Explanation(
        "prediction", f"P(at least {quorum})", "Poisson-binomial over availabilities", numbers if few else "",
        p.quorum_probability, "",
    )  # fmt: skip
    yield Explanation(
        "prediction", "P(all)", "product of availabilities", here if few else "", p.all_present_probability, ""
    )
    sums = " + ".join(short(island.predicted_tokens_per_s) for island in plan.islands) if few else ""
    yield Explanation("prediction", "tokens/s", "sum of the islands' predictions", sums, p.tokens_per_s, "tokens/s")
    ratio = f"{short(p.tokens_per_s)} / {short(p.tokens_per_s_ideal)}"
    yield Explanation("prediction", "goodput", "tokens/s / ideal", ratio, p.goodput, "")
    days = f"{short(plan.run.train.tokens)} / {short(p.tokens_per_s)} / 86400"
    yield Explanation("prediction", "time to the target", "tokens / (tokens/s)", days, p.days_to_target, "d")
    yield _synchronous(plan, fleet)


def _synchronous(plan: Plan, fleet: Fleet) -> Explanation:
    """Data-parallel: a step is the compute and what of the all-reduce the backward pass cannot hide."""
    batch, count = sum(c.batch_tokens for c in fleet.kept), len(fleet.kept)
    compute = f"{batch} / {short(sum(c.tokens_per_s for c in fleet.kept))}"
    known = [bps for c in fleet.kept for bps in (c.island.link.up_bps, c.island.link.down_bps) if bps is not None]
    reduce = "0"
    if count > 1 and known:
        reduce = f"2 * {count - 1} / {count} * {short(plan.model.parameters)} * 16 / {short(min(known))}"
    step = f"({compute} + max(0, {reduce} - 2 / 3 * {compute}))"
    here = short(plan.prediction.all_present_probability)
    formula = "batch / (compute + max(0, all-reduce - 2/3 compute)) x P(all)"
    numbers = f"{batch} / {step} * {here}"
    return Explanation(
        "prediction", "synchronous", formula, numbers, plan.prediction.synchronous_tokens_per_s, "tokens/s"
    )


def _syncer(plan: Plan) -> Iterator[Explanation]:
    m, s, sync, count = plan.model, plan.schedule, plan.run.sync, len(plan.islands)
    up, down = CODEC_BITS[sync.codec], CODEC_BITS[sync.broadcast]
    per = f"(8 + 8 + {down:g} / 8 + {up:g} / 8)"
    numbers = f"(8 * {short(m.parameters)} + {per} * {short(s.fragment_parameters)} + 64e6) / 1e9"
    formula = "8 N + (next version + read back + cast + one payload) x largest fragment + 64 MB"
    yield Explanation("syncer", "memory", formula, numbers, plan.syncer.memory_gb, "GB")
    share = f"100 * {short(m.parameters)} * {count} / {short(MERGE_PARAMETERS_PER_S)} / {short(s.round_s)}"
    state = f"64 * {short(m.parameters)} + {short(m.parameters)} * {down:g}"
    read = f"({count} * {short(m.parameters)} * {up:g} + {state}) / {short(s.round_s)} / 1e6"
    formula = "(islands x delta + state + cast) / T: every delta, and both read back"
    yield Explanation("syncer", "down", formula, read, plan.syncer.down_mbps, "Mbps")
    written = f"({state}) / {short(s.round_s)} / 1e6"
    yield Explanation("syncer", "up", "(state + cast) / T", written, plan.syncer.up_mbps, "Mbps")
    yield Explanation(
        "syncer", "merging", "N x islands / parameters merged a second / T", share, plan.syncer.merge_percent, "%"
    )


def _money(plan: Plan) -> Iterator[Explanation]:
    c, round_s, sync, count = plan.money, short(plan.schedule.round_s), plan.run.sync, len(plan.islands)
    total = short(plan.model.parameters)
    up, down = CODEC_BITS[sync.codec] / 8, CODEC_BITS[sync.broadcast] / 8
    slot, watch_s = short(plan.schedule.slot_s), watch_every_s(plan.schedule.slot_s)
    looks_l = short(money.learners_looks_per_s(plan.schedule.slot_s))
    looks_s = short(money.syncers_looks_per_s(plan.schedule.slot_s))
    saved = short(moment_bytes(plan.run.train.inner))
    saves = f"{count} / ({plan.run.train.inner.save_every} * {plan.schedule.fragments})"
    rows = [
        (
            "egress",
            "islands x N x (bytes + moments / rounds between their saves) / T",
            f"{count} * {total} * ({up:g} + {saved}) / 1e9 * 86400 / {round_s}",
            c.egress_gb_per_day,
            "GB/day",
        ),
        (
            "class A requests",
            "(2 M + 3 + snapshots + saves) / slot + (M + 1) / beat",
            f"((2 * {count} + 3 + 1 / {money.SNAPSHOT_EVERY} + {saves}) / {slot} + ({count} + 1) / 3) * 86400",
            c.class_a_per_day,
            "/day",
        ),
        (
            "class B requests",
            "M (looks for commits + 1 / slot + 1 / fence) + M (looks into a mailbox + 1 / slot) + 2 / slot"
            " + M / watch + 2 / requests",
            f"({count} * ({looks_l} + 1 / {slot} + 1 / {short(max(money.FENCE_EVERY_S, watch_s))})"
            f" + {count} * ({looks_s} + 1 / {slot}) + 2 / {slot} + {count} / {short(watch_s)}"
            f" + 2 / {short(requests_every_s(plan.schedule.slot_s))}) * 86400",
            c.class_b_per_day,
            "/day",
        ),
        (
            "storage",
            "N x (state + cast + M x (delta + moments)) / T, until the retained rounds are full",
            f"{total} * ({money.STATE_BYTES} + {down:g} + {count} * ({up:g} + {saved})) / 1e9 * 86400 / {round_s}",
            c.storage_gb_per_day,
            "GB/day",
        ),
    ]
    yield from (Explanation("money", *row) for row in rows)


def _mirrors(plan: Plan, fleet: Fleet) -> Iterator[Explanation]:
    """What crosses between the home bucket and those of regions; nothing where there are none."""
    crossings = [kept.crossing for kept in fleet.kept if kept.crossing is not None]
    if not crossings:
        return
    up, down = CODEC_BITS[plan.run.sync.codec] / 8, CODEC_BITS[plan.run.sync.broadcast] / 8
    regions = {crossing.region: crossing.home_per_gb for crossing in crossings}
    a_day = f"{short(plan.model.parameters)} / 1e9 * 86400 / {short(plan.schedule.round_s)}"
    prices, home = sum(crossing.per_gb for crossing in crossings), sum(regions.values())
    yield Explanation(
        "money", "between buckets", "N x (regions x version + their islands x delta) / T",
        f"({len(regions)} * {down:g} + {len(crossings)} * {up:g}) * {a_day}", plan.money.mirrors_gb_per_day, "GB/day",
    )  # fmt: skip
    yield Explanation(
        "money", "egress of mirrors", "N x (version x home's prices + delta x regions' prices) / T",
        f"({down:g} * {short(home)} + {up:g} * {short(prices)}) * {a_day}", plan.money.mirrors_per_day, "/day",
    )  # fmt: skip


def _bills(plan: Plan) -> Iterator[Explanation]:
    """What the amounts cost, until the target is reached."""
    c, days, growth = plan.money, short(plan.prediction.days_to_target), short(plan.money.storage_gb_per_day)
    s = plan.schedule
    retained_days = money.retained_days(s.slot_s, s.fragments, plan.run)
    grows = short(min(plan.prediction.days_to_target, retained_days))
    rows = [
        (
            "requests",
            "class A x price + class B x price",
            f"{short(c.class_a_per_day)} * {short(money.CLASS_A_PRICE)}"
            f" + {short(c.class_b_per_day)} * {short(money.CLASS_B_PRICE)}",
            c.requests_per_day,
            "/day",
        ),
        (
            "storage at the end",
            "growth x min(days, days that are retained)",
            f"{growth} * {grows}",
            c.storage_gb_at_end,
            "GB",
        ),
        (
            "storage in all",
            "growth x g x (days - g / 2) x price of a GB and day, g = min(days, days that are retained)",
            f"{growth} * {grows} * ({days} - {grows} / 2) * {short(money.STORAGE_PRICE)}",
            c.storage_total,
            "",
        ),
        ("per hour", "money in all / days / 24", f"{short(c.total)} / {days} / 24", c.per_h, "/h"),
        (
            "money in all",
            f"days x (24 x price + egress{' + mirrors' if c.mirrors_per_day else ''} + requests) + storage",
            f"{days} * (24 * {short(c.accelerators_per_h)} + {short(c.egress_per_day)}"
            f"{f' + {short(c.mirrors_per_day)}' if c.mirrors_per_day else ''} + {short(c.requests_per_day)})"
            f" + {short(c.storage_total)}",
            c.total,
            "",
        ),
    ]
    yield from (Explanation("money", *row) for row in rows)


def sections(found: Sequence[Explanation]) -> dict[str, list[Explanation]]:
    """Grouped by what they belong to, in order."""
    grouped: dict[str, list[Explanation]] = {}
    for item in found:
        grouped.setdefault(item.of, []).append(item)
    return grouped
