"""A plan for people: one screen, which begins with the answer; everything that is known (-v); explained, beside what a
run measured, and as a picture. Plans beside each other: plan_choices.py.

Plain text without Rich: it looks the same in a terminal and in a pipe, and loads in no time. The table of -v shows the
most important columns that the terminal (or COLUMNS) has room for, and in a pipe every column.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from textwrap import wrap
from typing import Any, TypeVar

from diloco_cli.cli.output import table
from diloco_cli.config.hardware import compress_hostlist, find_device
from diloco_cli.config.settings import IslandSettings
from diloco_cli.environment import environment_value
from diloco_cli.plan.candidates import has_public_runs
from diloco_cli.plan.flow import DAY_S
from diloco_cli.plan.memory import host_bytes
from diloco_cli.plan.plan import Plan, PlannedIsland, Setting
from diloco_cli.plan.planner import rounds_of
from diloco_cli.plan.quality import expected_loss, unlike
from diloco_cli.plan.remarks import SYNCHRONOUS, TAKES, WORTH_MORE, is_too_short, without_egress_price
from diloco_cli.plots import bar_chart
from diloco_cli.quantities import format_bandwidth, format_count, format_duration, format_size, some_of

UNLIMITED = 10**6
COLUMNS, WIDEST = 80, 100  # of the text of -v; of one screen
LABEL = " " * 11
BAR_COLUMNS = 24
MAX_ROWS, MOST_LINES = 12, 4  # of the table of islands; of a list
LOSSES = {
    "after idle": "rounds not filled",
    "after link": "links and merging",
    "after failures": "failures",
}
LEAST_LOSS = 0.005
FULL = 75.0  # percent of its slot: of a syncer for which islands are left out
MORE = "more: -v, --explain, --json; what if: --set, --objective, --without, --add; start it: "
GB = 1e9


@dataclass(frozen=True)
class Column:
    """`rank`: the columns with the largest ones go first where there is no room."""

    heading: str
    cell: Callable[[PlannedIsland], str]
    rank: int
    left: bool = False


def _accelerators(island: PlannedIsland) -> str:
    nodes = island.devices // int(island.accelerators.rpartition(":")[2])
    return island.accelerators + (f" x{nodes}" if nodes > 1 else "")


def _of(needed: float, available: float | None) -> str:
    """'142/2k', or '142/?' where nothing is known."""
    have = "?" if available is None else format_count(available)
    return f"{needed:.0f}/{have}" if needed >= 10 else f"{needed:.2g}/{have}"


TABLE_COLUMNS = (
    Column("island", lambda i: i.name, 0, left=True),
    Column("region", lambda i: i.region, 12, left=True),
    Column("accelerators", _accelerators, 1, left=True),
    Column("tok/s", lambda i: format_count(i.tokens_per_s), 0),
    Column("batch", lambda i: format_count(i.batch_tokens), 4),
    Column("step", lambda i: format_duration(i.step_s), 2),
    Column("H_i", lambda i: str(i.local_steps), 2),
    Column("idle", lambda i: f"{i.idle_percent:.0f}%", 5),
    Column("up Mbps", lambda i: _of(i.up_mbps_needed, i.up_mbps_available), 3),
    Column("down", lambda i: _of(i.down_mbps_needed, i.down_mbps_available), 6),
    Column("sent", lambda i: f"{i.sent_mbps:.3g}", 10),
    Column("transfer", lambda i: f"{i.transfer_s:.3g}/{format_duration(max(0.0, i.transfer_window_s))}", 9),
    Column("GB", lambda i: _of(i.memory_gb_needed, i.memory_gb_available), 7),
    Column("sharding", lambda i: i.shards, 10, left=True),
    Column("there", lambda i: f"{100 * i.availability:.1f}%", 8),
    Column("price/h", lambda i: f"{i.price_per_h:g}", 11),
)


def islands_table(islands: Sequence[PlannedIsland], width: int) -> list[str]:
    return _narrowed(TABLE_COLUMNS, lambda columns: _lines(columns, islands), width)


def _narrowed(columns: Sequence[C], lines_of: Callable[[Sequence[C]], list[str]], width: int) -> list[str]:
    """Lines of at most `width` characters, unless names alone need more. Nothing inside a cell is ever cut."""
    while True:
        lines, widest = lines_of(columns), max(columns, key=lambda column: column.rank)
        if max(map(len, lines)) <= width or widest.rank == 0:
            return lines
        columns = [column for column in columns if column is not widest]


def _lines(columns: Sequence[Column], islands: Sequence[PlannedIsland]) -> list[str]:
    rows = [[column.heading for column in columns], *([column.cell(i) for column in columns] for i in islands)]
    return table(rows, gap=" ", left=[number for number, column in enumerate(columns) if column.left])


def plan_text(plan: Plan, confirmed: str = "", start: str = "diloco launch") -> str:
    """One screen, for any number of islands. `confirmed`: what a simulation says. `start`: how the run is
    started."""
    warnings = [w for w in plan.warnings if " is excluded: " not in w]
    left_out = [f"{e.name}: {'; '.join((e.reason, *e.suggestions[:1]))}" for e in plan.excluded]
    return _joined(
        answer(plan, confirmed),
        line_of(f"{plan.verdict}: {plan.why}", "  "),
        grouped_islands(plan.islands, min(table_columns(), WIDEST)),
        line_of(f"exchange   {_exchange(plan)}", LABEL),
        _first("left out", left_out),
        _first("to look at", warnings),
        line_of(MORE + start, "  "),
    )


def details_text(plan: Plan, confirmed: str = "") -> str:
    """Everything that is known of the plan."""
    alternatives = [f"{a.name}: {format_count(a.tokens_per_s)} tok/s, {a.reason}" for a in plan.alternatives]
    formed = [f"{f.name}: {compress_hostlist(f.machines).replace(',', ', ')}: {f.reason}" for f in plan.formed]
    return _joined(
        answer(plan, confirmed),
        _wrapped(f"{plan.verdict}: {plan.why}", "  "),
        islands_table(plan.islands, table_columns()),
        _list("islands were formed of machines", formed),
        *_excluded(plan),
        _schedule(plan),
        _memory(plan),
        _waterfall(plan),
        _outcome(plan),
        _list("warnings", [w for w in plan.warnings if " is excluded: " not in w]),
        _list("alternatives", alternatives),
        _list("assumptions", [f"{a.mark}: {a.text}" for a in plan.assumptions]),
    )


def labelled(said: Mapping[str, str]) -> str:
    return "\n".join(line for label, text in said.items() for line in line_of(f"{label:<11}{text}", LABEL))


def _joined(*blocks: Sequence[str]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks if block)


def answer(plan: Plan, confirmed: str = "") -> list[str]:
    """When it ends, how fast it is, what it costs; how sure that is, and what a simulation says; what limits it; what
    would help most."""
    p, m = plan.prediction, plan.money
    ends = f"{format_count(plan.run.train.tokens)} tokens in {format_duration(p.days_to_target * DAY_S)}"
    costs = f"{amount(m.total)} in all{without_egress(plan)} ({m.per_h:.2f}/h)"
    said = {"": f"{ends}: {format_count(p.tokens_per_s)} tok/s, {costs if m.is_priced else 'no price given'}"}
    said |= {"egress": missing} if (missing := _unpriced(plan)) else {}
    said |= {"how sure": _how_sure(plan)} | ({"confirmed": confirmed} if confirmed else {})
    said |= {"limited by": _limits(plan), "would help": _help(plan)}
    said |= {"loss": loss} if (loss := _loss(plan)) else {}
    return [line for label, text in said.items() for line in line_of(f"{label:<11}{text}" if label else text, LABEL)]


def amount(money: float) -> str:
    """Of money; to three digits where it is small: 0.0132, 5.84, 375."""
    return f"{money:,.0f}" if money >= 10 or not money else f"{money:.3g}"


def without_egress(plan: Plan) -> str:
    """Said of a price that lacks some or all of it."""
    m = plan.money
    has_some = m.egress_per_day or m.downloads_per_day or m.mirrors_per_day
    return f" without{' some' * bool(has_some)} egress" if _unpriced(plan) else ""


def _unpriced(plan: Plan) -> str:
    """What leaves regions without a price in the whole run, and where that price goes; empty where nothing has any
    price, or none is missing."""
    stated, planned = {i.name: i for i in plan.inventory.islands}, {i.name: i for i in plan.islands}
    uploading, downloading = without_egress_price([stated[name] for name in planned], plan.inventory)
    if not plan.money.is_priced or not (uploading or downloading):
        return ""
    home = plan.inventory.store.region
    regions = [i.region for i in uploading] + ([home] if home and downloading else [])
    keys = [*([] if home else ["store.region"]), *(f"regions.{region}.egress" for region in dict.fromkeys(regions))]
    mbps = [planned[i.name].sent_mbps for i in uploading] + [planned[i.name].received_mbps for i in downloading]
    size = format_size(math.fsum(mbps) * 1e6 / 8 * DAY_S * plan.prediction.days_to_target)
    return f"no price of {size} that leave their region: in the inventory {some_of(keys)}; 0.02 to 0.12/GB is usual"


def _loss(plan: Plan) -> str:
    """Over data-parallel training at equal tokens, as the nearest trial had it."""
    run, inner, rounds = plan.run, plan.run.train.inner.name, rounds_of(plan.run, plan.islands)
    found = expected_loss(len(plan.islands), rounds, inner, plan.model.parameters, run.train.tokens)
    if found is None:
        alone = "taken as that of data-parallel training: it is one island; a --deadline may take more"
        return alone if plan.goal.objective == "loss" else ""
    trial, interval = found.nearest, "" if found.nearest.half_width is None else f" ± {found.nearest.half_width:.1f}"
    who = f"{trial.islands} islands with {trial.rounds} rounds of {trial.optimizer},"
    who += f" {format_count(trial.parameters)} parameters and {trial.tokens_per_parameter:g} tokens for each"
    seeds = "one seed" if trial.seeds == 1 else f"{trial.seeds} seeds"
    others = [*found.beyond, *unlike(trial, run, rounds)]
    beyond = f"; extrapolated: {', '.join(others)}" if others else ""
    if is_too_short(run.outer, inner, rounds):
        beyond += f"; more, with only {round(rounds):,} rounds at momentum {run.outer.momentum:g}"
    return f"{trial.percent:+.1f}{interval} % over data-parallel at equal tokens, as {who} had ({seeds}){beyond}"


def _how_sure(plan: Plan) -> str:
    """What the speeds and links rest on."""
    stated = {island.name: island for island in plan.inventory.islands}
    islands = [stated[island.name] for island in plan.islands]
    marks = {"measured": 0, "by the MFU given": 0, "as public runs": 0, "guessed": 0}
    for island in islands:
        device = find_device(island.accelerators.name, plan.inventory.devices)
        guess = "as public runs" if has_public_runs(device, plan.run.train.precision) else "guessed"
        marks["measured" if island.tokens_per_s else "by the MFU given" if island.mfu else guess] += 1
    speeds = ", ".join(f"{count} {mark}" for mark, count in marks.items() if count)
    return f"speeds: {speeds}; {_links_known(islands)}"


def _links_known(islands: Sequence[IslandSettings]) -> str:
    """Which parts of which links nobody gave."""
    lacking: dict[str, list[str]] = {}
    for island in islands:
        link = island.link
        parts = {"up": link.up_bps, "down": link.down_bps, "rtt": link.rtt_s}
        if missing := [name for name, given in parts.items() if given is None]:
            lacking.setdefault(" and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]])), []).append(
                island.name
            )
    guessed = "; ".join(f"{missing} of {_and_more(names)}" for missing, names in lacking.items())
    return f"links: guessed {guessed}" if guessed else "links as stated"


def _limits(plan: Plan) -> str:
    needs, ideal = plan.syncer, plan.prediction.tokens_per_s_ideal
    found = ", ".join(f"{name} -{100 * share:.1f} %" for name, share in losses(plan)) or "the accelerators alone"
    late = f"the syncer, {needs.busy_percent:.0f} % busy: " if needs.busy_percent > 100 else ""
    busy = "" if late else f"; syncer {needs.busy_percent:.0f} % busy"
    return f"{late}{found}, of {format_count(ideal)} tok/s{busy}"


def losses(plan: Plan) -> list[tuple[str, float]]:
    """From ideal to predicted: what takes a share of the speed, the largest first."""
    stages = plan.prediction.waterfall
    found = [(LOSSES[now.name], 1 - now.tokens_per_s / before.tokens_per_s) for before, now in pairwise(stages)]
    return sorted((item for item in found if item[1] >= LEAST_LOSS), key=lambda item: -item[1])


def _help(plan: Plan) -> str:
    """The best of the alternatives, if it is better than the plan."""
    mine, of_cost, needs = plan.prediction.tokens_per_s, plan.goal.objective == "cost", plan.syncer
    tried = [a for a in plan.alternatives if a.name != SYNCHRONOUS]
    possible = (a for a in tried if a.tokens_per_s)
    best = max(possible, key=lambda a: -a.total if of_cost else a.tokens_per_s, default=None)
    if best is None or (plan.money.total / best.total if of_cost else best.tokens_per_s / mine) < WORTH_MORE:
        full = plan.excluded and needs.busy_percent > FULL
        more = f"the syncer is full, most of it for {TAKES[needs.limit]}" if full else "more or faster accelerators"
        return f"nothing of what was tried ({len(tried)} other settings): {more}"
    money = f"{best.total:,.0f} in all instead of {plan.money.total:,.0f}, " if of_cost else ""
    return f"--set {best.name}: {money}{best.reason.rpartition(' (')[0]}"


def _exchange(plan: Plan) -> str:
    s = plan.schedule
    searched = [name for _, name in _searched(plan)]
    found = f"; searched: {', '.join(searched)}" if searched else ""
    found += f"; outer {fitting}" if (fitting := _fitting(plan)) else ""
    return (
        f"each {s.sync_every} steps ({format_duration(s.round_s)}), {s.fragments} fragments, {codecs(plan)}, overlap"
        f" {s.overlap}, quorum {s.quorum}{found}"
    )


def codecs(plan: Plan) -> str:
    s = plan.schedule
    return s.codec if s.codec == s.weights_codec else f"{s.codec} up, {s.weights_codec} down"


def _first(heading: str, lines: Sequence[str]) -> list[str]:
    """So many as a screen has room for; what is said of several islands is said once."""
    said: dict[str, list[str]] = {}
    for name, _, text in (line.partition(": ") for line in lines):
        said.setdefault(text, []).append(name)
    shown = [f"  - {_and_more(names)}: {text}" if text else f"  - {names[0]}" for text, names in said.items()]
    more = [f"  - and {len(shown) - MOST_LINES:,} more (-v)"] if len(shown) > MOST_LINES else []
    wrapped = chain.from_iterable(line_of(line, "    ") for line in [*shown[:MOST_LINES], *more])
    return [f"{heading}:", *wrapped] if lines else []


def _and_more(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")


@dataclass(frozen=True)
class Figure:
    """A column of the grouped table: a sum over the row's islands, or the range of their values."""

    heading: str
    of: Callable[[PlannedIsland], float | None]
    text: Callable[[float], str]
    rank: int
    added: bool = False


C = TypeVar("C", Column, Figure)


def _percent_text(share: float) -> str:
    return f"{100 * share:.0f}%"


def _link_used(island: PlannedIsland) -> float | None:
    pairs = ((island.sent_mbps, island.up_mbps_available), (island.received_mbps, island.down_mbps_available))
    return max((used / have for used, have in pairs if have), default=None)


FIGURES = (
    Figure("tok/s", lambda i: i.tokens_per_s, format_count, 0, added=True),
    Figure("step", lambda i: i.step_s, format_duration, 3),
    Figure("H_i", lambda i: i.local_steps, lambda steps: f"{steps:.0f}", 2),
    Figure("idle", lambda i: i.idle_percent / 100, _percent_text, 7),
    Figure("link", _link_used, _percent_text, 1),
    Figure("memory", lambda i: i.memory_gb_available and i.memory_gb_needed / i.memory_gb_available, _percent_text, 4),
    Figure("there", lambda i: i.availability, _percent_text, 6),
    Figure("price/h", lambda i: i.price_per_h, lambda price: f"{price:g}", 5, added=True),
)


def grouped_islands(islands: Sequence[PlannedIsland], width: int) -> list[str]:
    """At most MAX_ROWS rows: islands that look alike share one; where these are too many, those with the same
    accelerators; and the smallest of those share the last one."""
    groups = _groups(islands, lambda i: (_accelerators(i), *(f.of(i) is not None and f.text(f.of(i)) for f in FIGURES)))  # type: ignore[arg-type]
    if len(groups) > MAX_ROWS:
        groups = _groups(islands, lambda i: i.accelerators.partition(":")[0])
        groups.sort(key=lambda group: -sum(i.tokens_per_s for i in group))
        rest = list(chain.from_iterable(groups[MAX_ROWS - 1 :]))
        groups = [*groups[: MAX_ROWS - 1], *([rest] if rest else [])]
    return _narrowed(FIGURES, lambda figures: _rows(figures, groups), width)


def _groups(islands: Sequence[PlannedIsland], key: Callable[[PlannedIsland], Hashable]) -> list[list[PlannedIsland]]:
    found: dict[Hashable, list[PlannedIsland]] = {}
    for island in islands:
        found.setdefault(key(island), []).append(island)
    return list(found.values())


def _rows(figures: Sequence[Figure], groups: Sequence[Sequence[PlannedIsland]]) -> list[str]:
    rows = [["islands", "accelerators", *(figure.heading for figure in figures)]]
    for group in groups:
        kinds = list(dict.fromkeys(map(_accelerators, group)))
        rows.append(
            [_and_more([i.name for i in group]), _and_more(kinds), *(_cell(figure, group) for figure in figures)]
        )
    return table(rows, gap=" ", left=(0, 1))


def _cell(figure: Figure, group: Sequence[PlannedIsland]) -> str:
    values = [value for value in map(figure.of, group) if value is not None]
    if not values:
        return "?"
    ends = [sum(values)] if figure.added else [min(values), max(values)]
    return "-".join(dict.fromkeys(map(figure.text, ends)))


def table_columns() -> int:
    """What COLUMNS says, else the terminal's width; in a pipe no column is dropped."""
    wanted = environment_value("COLUMNS") or ""
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED


def _excluded(plan: Plan) -> Iterator[list[str]]:
    for island in plan.excluded:
        ways = chain.from_iterable(_wrapped(f"  suggestion: {way}", "              ") for way in island.suggestions)
        yield [*_wrapped(f"excluded: {island.name}: {island.reason}", "  "), *ways]


def _schedule(plan: Plan) -> list[str]:
    s, gamma = plan.schedule, plan.run.sync.grace.gamma
    step, round_, slot = (format_duration(x) for x in (s.round_s / s.sync_every, s.round_s, s.slot_s))
    exchange, grace = format_duration(s.exchange_s), format_duration(s.grace_s)
    slack = f"{'-' if s.slack_s < 0 else ''}{format_duration(abs(s.slack_s))}"
    pinned = [f"{item.name.removeprefix('sync.')} ({item.origin})" for item in plan.settings if item.pinned]
    searched = [f"{name}={item.value}" for item, name in _searched(plan)]
    offsets = ", ".join(map(str, s.offsets[:4])) + (f", ... {s.offsets[-1]}" if len(s.offsets) > 4 else "")
    lines = [
        f"round T    {s.sync_every} x {step}, the fastest step, = {round_}; H_i = round(T / step)",
        f"slot       {round_} / {s.fragments} fragments = {slot}, {codecs(plan)}",
        f"offsets    a fragment is due after steps {offsets} of a round",
        f"overlap    {s.overlap} slots for an exchange of {exchange}: slack {slack}",
        f"quorum     {s.quorum}, grace {grace} ({gamma:g} of the slack, at most one slot)",
    ]
    if pinned:
        lines += _labelled("pinned", ", ".join(pinned))
    if searched:
        lines += _labelled("searched", f"{', '.join(searched)}; launch takes them")
    if fitting := _fitting(plan):
        lines += _labelled("outer", fitting)
    return lines


def _fitting(plan: Plan) -> str:
    """`lr 0.4, momentum 0.9 (auto: 98 rounds of adamw)`; empty if they were given."""
    found = [item for item in plan.settings if item.name.startswith("outer.")]
    values = ", ".join(f"{item.name.removeprefix('outer.')} {item.value}" for item in found)
    return f"{values} ({found[0].origin})" if found else ""


def _searched(plan: Plan) -> list[tuple[Setting, str]]:
    """With its name in `sync`."""
    sync = [item for item in plan.settings if item.name.startswith("sync.") and not item.pinned]
    return [(item, item.name.removeprefix("sync.")) for item in sync]


def _memory(plan: Plan) -> list[str]:
    """What accelerators, learners and the syncer must hold: one line for islands that need the same."""
    groups: dict[str, list[str]] = {}
    for island in plan.islands:
        parts = ", ".join(f"{part.name} {format_size(part.gb * GB)}" for part in island.memory_parts)
        sharding = "" if island.sharding == "none" else f" ({island.shards})"
        micro = f", micro-batches of {island.micro_batch_tokens:,} tokens" if island.micro_batch_tokens else ""
        text = f"{format_size(island.memory_gb_needed * GB)} on each accelerator{sharding}{micro}: {parts}"
        groups.setdefault(text, []).append(island.name)
    lines: list[str] = []
    for text, names in groups.items():
        lines += _labelled("memory", f"{', '.join(names)}: {text}")
    host, needs = format_size(max(i.host_memory_gb_needed for i in plan.islands) * GB), plan.syncer
    links = f"{format_bandwidth(needs.down_mbps * 1e6)} down, {format_bandwidth(needs.up_mbps * 1e6)} up"
    syncer = f"{format_size(needs.memory_gb * GB)}, {links}, {needs.merge_percent:.0f} % of its time merging"
    each = f"{host_bytes(plan.run, plan.model):.3g}"
    kept = f"on the host that commands an island, beside its devices: {each} bytes a parameter and what is on its way"
    lines += _labelled("hosts", f"{host} {kept}; the syncer: {syncer}")
    return [*lines, *_labelled("syncer", _syncer(plan)), *_labelled("disk", _disk(plan))]


def _syncer(plan: Plan) -> str:
    """The shortest slot that the syncer holds, and what it is spent on."""
    needs = plan.syncer
    parts = {"calls": needs.calls_s, "bytes": needs.bytes_s, "its processor": needs.processor_s}
    spent = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items())
    percent = f"{needs.busy_percent:.0f}" if needs.busy_percent >= 10 else f"{needs.busy_percent:.2g}"
    busy = f"{percent} % of a slot of {format_duration(plan.schedule.slot_s)}"
    most = f"up to {needs.max_islands:,} islands" if needs.max_islands else "longer than a slot even with one island"
    return f"a merge takes {format_duration(needs.fastest_slot_s)}, {busy} ({spent}); {most}"


def _disk(plan: Plan) -> str:
    """Learners keep only logs on disk; a store in a folder needs space on its machine's disk."""
    learner = "a learner needs none but for logs and its data"
    url = plan.inventory.store.url
    if "://" in url and not url.startswith("file://"):
        return f"{learner}; everything else is in {url}"
    kept = format_size(plan.money.storage_gb_at_end * GB)
    bound = f"{kept} by its end" if plan.run.retention.rounds == "all" else f"at most {kept}"
    return f"{learner}; the store's folder holds {bound}"


def _waterfall(plan: Plan) -> list[str]:
    lines = []
    for name, rate, days in _stages(plan):
        share = rate / plan.prediction.tokens_per_s_ideal
        bar = "█" * round(BAR_COLUMNS * share)
        time = format_duration(days * DAY_S)
        lines.append(f"{name:<15} {format_count(rate):>6} tok/s  {bar:<{BAR_COLUMNS}} {100 * share:5.1f} %  {time:>8}")
    return lines


def _stages(plan: Plan) -> list[tuple[str, float, float]]:
    """From ideal to predicted, and synchronous training beside it: tokens per second and days to the target."""
    p = plan.prediction
    stages = [(stage.name, stage.tokens_per_s, stage.days) for stage in p.waterfall]
    return [*stages, ("synchronous", p.synchronous_tokens_per_s, p.synchronous_days_to_target)]


def _outcome(plan: Plan) -> list[str]:
    p, m = plan.prediction, plan.money
    target = format_count(plan.run.train.tokens)
    lines = [f"{target} tokens in {format_duration(p.days_to_target * DAY_S)}"]
    lines += _labelled("present", _present(plan))
    if p.price_per_h or p.egress_per_day or m.mirrors_per_day or m.downloads_per_day:
        parts = f"accelerators {m.accelerators_per_h:.2f}/h, egress {m.egress_per_day:.2f}/day"
        parts += f", downloads {m.downloads_per_day:.2f}/day" if m.downloads_per_day else ""
        parts += f", between buckets {m.mirrors_per_day:.2f}/day" if m.mirrors_per_day else ""
        rest = f"requests {m.requests_per_day:.2f}/day, storage {m.storage_total:,.0f} in all"
        per_token = f"{m.per_billion_tokens:.3g} per 1B tokens"
        lines += _labelled("money", f"{m.per_h:.2f}/h, {m.total:,.0f} to the target, {per_token}: {parts}, {rest}")
    requests = f"{format_count(m.class_a_per_day)} writes and {format_count(m.class_b_per_day)} reads a day"
    written, kept = format_size(m.storage_gb_per_day * GB), format_size(m.storage_gb_at_end * GB)
    rounds, objects = plan.run.retention.rounds, f"{format_count(m.objects_at_end)} objects at the end"
    growth = f"grows by {written}/day to {kept} in {objects}, as nothing is deleted (retention.rounds: all)"
    if rounds != "all":
        growth = f"{written}/day written, at most {kept} in {format_count(m.objects_kept)} objects kept"
        growth += f" (retention.rounds: {rounds}), {objects}"
    sent = format_size(m.egress_gb_per_day * GB)
    lines += _labelled("store", f"{sent}/day sent by islands; {requests}; {growth}")
    return lines


def _present(plan: Plan) -> str:
    p, count = plan.prediction, len(plan.islands)
    parts = [f"at least {plan.schedule.quorum}, the quorum, {_percent(p.quorum_probability)}"]
    known = len(p.present_probabilities) == count
    if known and count - 1 > plan.schedule.quorum:
        parts.append(f"at least {count - 1} {_percent(p.present_probabilities[count - 2])}")
    if count > plan.schedule.quorum:
        parts.append(f"all {count} {_percent(p.all_present_probability)}")
    return ", ".join(parts) + " of the time"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.9995 or share == 1 else f"{100 * share:.4g} %"


def _list(heading: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return [f"{heading}:", *chain.from_iterable(_wrapped(f"  - {line}", "    ") for line in lines)]


def _labelled(label: str, text: str) -> list[str]:
    return _wrapped(f"{label:<11}{text}", " " * 11)


def line_of(line: str, indent: str) -> list[str]:
    """As wide as the screen, up to WIDEST."""
    return _wrapped(line, indent, min(table_columns(), WIDEST))


def _wrapped(line: str, indent: str, columns: int = COLUMNS) -> list[str]:
    return wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def explanation_text(explanations: Sequence[Mapping[str, Any]]) -> str:
    """Grouped by what the numbers belong to; the formula, and under it the same with numbers."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for item in explanations:
        groups.setdefault(item["of"], []).append(item)
    blocks = [[f"{of}:", *chain.from_iterable(map(_explained, items))] for of, items in groups.items()]
    return "\n\n".join("\n".join(block) for block in blocks)


def _explained(item: Mapping[str, Any]) -> list[str]:
    value = f"{item['value']:,.6g}" if abs(item["value"]) < 1e6 else format_count(item["value"])
    head = f"  {item['name']} = {value}{' ' + item['unit'] if item['unit'] else ''}"
    body = f"      = {item['formula']}"
    return [head, body, f"      = {item['numbers']}"] if item["numbers"] else [head, body]


def confirmed_text(plan: Plan, extra: Mapping[str, Any]) -> str:
    """What the run's own syncer and learners merge in virtual time, its range, and by how much the plan is off."""
    if "confirmed" not in extra:
        return f"no: {extra['not_confirmed']}" if "not_confirmed" in extra else ""
    found = extra["confirmed"]
    rate, least, most = (found[f"{name}tokens_per_s"] for name in ("", "least_", "most_"))
    if not rate:
        return f"nothing was merged in {format_duration(found['simulated_s'])} of virtual time"
    days = [format_duration(plan.run.train.tokens / each) if each else "never" for each in (most, least)]
    ends = f"{format_count(least)} to {format_count(most)} ({' to '.join(days)})"
    why = f"links and speeds {found['off_percent']:.0f} % off"
    why += f" and {found['histories']} histories of failures" if found["histories"] else ""
    off = round(found["plan_off_percent"])
    says = f"{abs(off)} % {'more' if off > 0 else 'less'}" if off else "the same"
    return f"{format_count(rate)} tok/s in virtual time, {ends} with {why}; the plan says {says}"


def calibration_text(comparison: Sequence[Mapping[str, Any]]) -> str:
    """Predicted and measured side by side."""
    rows = [("compared", "predicted", "measured", "measured / predicted")]
    rows += [(row["what"], _number(row["predicted"]), _number(row["measured"]), _ratio(row)) for row in comparison]
    lines = table(rows, gap=" ")
    noted = {row["note"]: row["what"].rpartition(": ")[2] for row in reversed(comparison) if row["note"]}
    notes = [f"{what}: {note}" for note, what in reversed(noted.items())]
    again = "planned again with what was measured (speeds, links up, failures and restarts):"
    return "\n".join([*lines, *notes, "", again])


def _number(value: float | None) -> str:
    return "?" if value is None else format_count(value)


def _ratio(row: Mapping[str, Any]) -> str:
    return "?" if row["ratio"] is None else f"{row['ratio']:.3f}"


def waterfall_svg(plan: Plan) -> str:
    bars = [
        (name, rate, f"{format_count(rate)} tok/s, {format_duration(days * DAY_S)}")
        for name, rate, days in _stages(plan)
    ]
    target = format_count(plan.run.train.tokens)
    return bar_chart(f"{plan.run.name}: {len(plan.islands)} islands, {target} tokens", bars)
