"""Status as text for people. First whether the run is well, what limits it, what failed and what to do; then its units,
and what happened. The same lines are printed plain, where no terminal reads, and in colour; the live screen has them in
as many lines as the terminal has, with the curves of loss and pace."""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from diloco_cli.digests import short_digest
from diloco_cli.engines.port import Job
from diloco_cli.errors import escaped
from diloco_cli.observe.facts import UNKNOWN, moment
from diloco_cli.observe.fields import UnitColumn, declared
from diloco_cli.observe.situation import RUN_STATES, State
from diloco_cli.observe.status import (
    MOST_GOODPUT,
    GarbageStatus,
    LearnerStatus,
    MirrorStatus,
    Status,
    SyncerStatus,
    age,
    rate_between,
)
from diloco_cli.observe.unit_states import BAD, UNIT_STATES, WARNING
from diloco_cli.protocol.log.metrics import Metrics, thinned
from diloco_cli.quantities import format_count, format_duration, format_size

GAP = "   "
RECENT_LINES = 5
MAX_ERRORS = 5
MAX_NAME, SHORTEST_NAME = 24, 8
WIDEST = 10_000  # columns, where no terminal reads
AFTERWARDS = ("export", "report", "verify")
STYLE_OF = {str(state): word.style for states in (UNIT_STATES, RUN_STATES) for state, word in states.items()}
COLUMNS: tuple[UnitColumn, ...] = tuple(each.column for _, each in declared(LearnerStatus) if each.column is not None)
Row = dict[str, str]


# -- lines --------------------------------------------------------------------------------------------------------


def lines_of(texts: Iterable[str], style: str = "") -> list[Text]:
    return [Text(text, style) for text in texts]


def flowing(parts: Iterable[str], width: int | None, indent: str = "  ", first: str = "") -> list[str]:
    """The parts beside each other, in as many lines as they need, those after the first indented; a part that is too
    long is wrapped by its words."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and (width is None or len(lines[-1]) + len(GAP) + len(part) <= width):
            lines[-1] += GAP + part
        else:
            lines += wrapped(part, width, indent, indent if lines else first)
    return lines


def wrapped(text: str, width: int | None, indent: str = "  ", first: str = "") -> list[str]:
    """The text in lines of at most `width`, those after the first indented."""
    if width is None or len(first) + len(text) <= width:
        return [first + text]
    return textwrap.wrap(text, max(width, 20), initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else text[: max(0, width - 1)] + "…"


def plain(lines: Iterable[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def styled(lines: Iterable[Text]) -> Text:
    return Text("\n", no_wrap=True, end="").join(lines)


# -- the screen ---------------------------------------------------------------------------------------------------


def status_text(status: Status, width: int | None = None) -> str:
    """The whole screen. Without a width nothing is shortened or wrapped."""
    return plain(status_lines(status, width))


def status_lines(status: Status, width: int | None = None) -> list[Text]:
    return [
        *head_lines(status, width),
        *unit_table(status, width),
        *rest_lines(status, width),
        *recent_lines(status, width, RECENT_LINES),
    ]


def head_lines(status: Status, width: int | None) -> list[Text]:
    """What a person has to know: progress, the verdict and its cause, what limits the pace, what failed, the rates."""
    style = STYLE_OF.get(status.state, "")
    first, *others = flowing([f"run {escaped(status.run)}", status.state, *progress_parts(status)], width)
    lines = [Text(first, "bold"), *lines_of(others)]
    lines[0].highlight_words([status.state], style)
    lines += lines_of((text for reason in reasons(status) for text in wrapped(reason, width)), style)
    for error in status.errors[:MAX_ERRORS]:
        told = f"{error.unit} failed at {clock(error.time)}: {error.text}".splitlines()
        lines += lines_of((text for line in told for text in wrapped(escaped(line), width)), "red")
    if status.limit and status.limit != status.reason:
        lines += lines_of(wrapped(f"limit: {escaped(status.limit)}", width), "yellow")
    if status.state == State.FINISHED and status.store is not None:
        lines += lines_of(flowing(next_commands(status.store.url), width, first="next: "), "bold")
    elif status.hint:
        lines += lines_of(wrapped(f"hint: {escaped(status.hint)}", width), "bold")
    return [*lines, *lines_of(flowing(pulse_parts(status), width))]


def reasons(status: Status) -> list[str]:
    """Why the run is in its state, and since when; nothing where it is well."""
    if status.state == State.MERGING or not status.reason:
        return []
    if status.since_s is None:
        return [escaped(status.reason)]
    long = format_duration(status.since_s)
    since = f"finished {long} ago" if status.state == State.FINISHED else f"for {long}"
    return [f"{since}: {escaped(status.reason)}"]


def next_commands(run: str) -> list[str]:
    """What one does with a run that is over."""
    return [f"diloco {command} {escaped(run)}" for command in AFTERWARDS]


def progress_parts(status: Status) -> list[str]:
    done = 100 * status.tokens / status.tokens_target
    parts = [
        f"commit {status.commit}" if status.commit >= 0 else "no commit yet",
        f"tokens {format_count(status.tokens)} / {format_count(status.tokens_target)} ({min(done, 100):.1f}%)",
    ]
    if status.eta_s is not None:
        parts.append(f"ETA {format_duration(status.eta_s)}")
    return parts


def pulse_parts(status: Status) -> list[str]:
    parts = [_loss(status)]
    if status.tokens_per_s is not None:
        parts.append(f"{format_count(status.tokens_per_s)} tok/s merged")
    if status.goodput is not None:
        parts.append(f"goodput {100 * status.goodput:.1f}%")
    if status.participation is not None:
        parts.append(f"participation {100 * status.participation:.0f}%")
    parts.append(f"as of {format_duration(status.age_s)} ago" if status.age_s is not None else "no heartbeat yet")
    merge = status.last_merge
    if merge is not None:
        parts.append(
            f"last merge {format_duration(merge.age_s)} ago: {merge.participants} of {merge.alive}, "
            f"waited {merge.grace_used_s:.2f}s of {merge.grace_s:.2f}s grace"
        )
    return parts


def _loss(status: Status) -> str:
    if status.loss is not None:
        return f"loss {status.loss:.3f}"
    losses = [learner.loss for learner in status.learners if learner.loss is not None]
    trained = f": {sum(losses) / len(losses):.3f} in training" if losses else ""
    return f"loss not evaluated yet{trained}"


def rest_lines(status: Status, width: int | None) -> list[Text]:
    """What else there is to know: its jobs, a loss that jumped, garbage, the regions' buckets, whom the run trusts."""
    tells_loss = status.divergence and status.state != State.PAUSED  # there it is the reason
    texts = [(f"loss: {escaped(status.divergence)}", "yellow")] if tells_loss else []
    alarm = "bold red" if (status.goodput or 0.0) > MOST_GOODPUT else "yellow"
    texts += [(f"plan: {escaped(status.doubts)}", alarm)] if status.doubts else []
    texts += [(escaped(status.partial), "yellow")] if status.partial else []
    if status.garbage is not None and status.garbage.note:
        texts.append((f"garbage: {status.garbage.note}", "yellow"))
    texts += [(syncer_text(status.syncer), ""), (garbage_text(status.garbage), "")]
    lines = lines_of(cut(escaped(line), width) for line in job_lines(status.jobs))
    lines += [line for text, style in texts for line in lines_of(filter(None, wrapped(text, width)), style)]
    for mirror in status.mirrors:
        lines += lines_of(flowing(mirror_parts(mirror), width, "    "), "" if mirror.state == "FOLLOWS" else "yellow")
    plan = f"plan {escaped(short_digest(status.plan))}; " if status.plan else ""
    return lines + lines_of(filter(None, wrapped(f"{plan}{status.trust}", width)), "dim")


def job_lines(jobs: Iterable[Job]) -> list[str]:
    rows = [("UNIT", "ENGINE", "JOB", "STATE", "WHERE, WHY")]
    for job in jobs:
        rows.append((job.unit, job.engine, job.id or "-", job.state, ", ".join(filter(None, (job.node, job.why)))))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join((*map(str.ljust, row[:4], widths), row[4])).rstrip() for row in rows]
    return lines if len(rows) > 1 else []


def garbage_text(garbage: GarbageStatus | None) -> str:
    """What waits to be deleted; "" if nothing does, or a warning says it."""
    if garbage is None or garbage.note:
        return ""
    if garbage.per_h is None:
        return f"garbage: how much waits to be deleted is not known yet, {garbage.objects:,} objects were found so far"
    waits = f"garbage: about {garbage.objects:,} objects wait to be deleted, {garbage.per_h:+,.0f} an hour"
    return waits if garbage.objects else ""


def syncer_text(syncer: SyncerStatus | None) -> str:
    """The share of a slot that the syncer needs; "" while that is not measured."""
    if syncer is None or syncer.busy_percent is None or syncer.slot_s is None:
        return ""
    share = f"{syncer.busy_percent:.0f}% of its slot of {format_duration(syncer.slot_s)}"
    return f"the syncer needs {share}, most of it for {syncer.limit}"


def mirror_parts(mirror: MirrorStatus) -> list[str]:
    """One region's own bucket: how far its log goes, the traffic, and errors."""
    words = [f"region {escaped(mirror.region)}", mirror.state.lower()]
    if mirror.commits_behind and mirror.state != "FOLLOWS":
        plural = "s" if mirror.commits_behind != 1 else ""
        late = f"{mirror.commits_behind} commit{plural} behind"
        words.append(f"{late} for {format_duration(mirror.behind_s)}" if mirror.behind_s >= 1 else late)
    words += [
        f"{mirror.offers} offers carried home",
        f"{format_size(mirror.up_bytes)} to it, {format_size(mirror.down_bytes)} from it",
        f"{mirror.requests:,} requests, {mirror.writes:,} of them writes",
    ]
    if mirror.egress_cost:
        words.append(f"egress costs {mirror.egress_cost:.4g}")
    if mirror.unheard:
        words.append(f"not heard: {escaped(', '.join(mirror.unheard))}")
    return [*words, escaped(mirror.last_error)]


def recent_lines(status: Status, width: int | None, most: int) -> list[Text]:
    """The newest events, the newest first."""
    if not status.recent or most < 2:
        return []
    told = [f"{clock(event.time)}  {escaped(event.unit)}: {escaped(event.text)}" for event in status.recent[:most]]
    return [Text("recent:", "bold"), *lines_of(text for line in told for text in wrapped(line, width, " " * 10))]


def plain_line(status: Status) -> str:
    """One line for logs and pipes."""
    learners = " ".join(f"{one.name}:{escaped(one.state.lower())}" for one in status.learners)
    trouble = [f"store: {escaped(status.store.retrying)}"] if status.store and status.store.retrying else []
    parts = [f"{status.run} {status.state}", *reasons(status), *progress_parts(status), *pulse_parts(status)]
    return flowing([*parts, learners, *trouble], None)[0]


def clock(time: str) -> str:
    return "--:--:--" if moment(time) == UNKNOWN else moment(time).astimezone().strftime("%H:%M:%S")


def date_and_clock(time: str) -> str:
    """For lists that go on for days."""
    return f"{'----------' if moment(time) == UNKNOWN else moment(time).astimezone().date()} {clock(time)}"


# -- the table of units -------------------------------------------------------------------------------------------


def unit_table(status: Status, width: int | None, max_rows: int | None = None) -> list[Text]:
    """A row for each unit. Columns give way until the rows fit the width; what is then left to say of a unit stands
    below. With more units than `max_rows`, those that are not well come first, and the others are counted."""
    rows: list[Row] = [{each.heading: each.text(learner) for each in COLUMNS} for learner in status.learners]
    left_out: list[Row] = []
    if max_rows is not None and len(rows) > max_rows:
        rows.sort(key=lambda row: {BAD: 0, WARNING: 1}.get(STYLE_OF.get(row["STATE"], ""), 2))
        rows, left_out = rows[: max_rows - 1], rows[max_rows - 1 :]
    rows += _other_rows(status)
    console = Console(file=io.StringIO(), width=width or WIDEST, color_system=None)
    columns, max_name = _fitting(rows, width, console)
    lines = [
        Text.assemble(*((part.text, part.style or "") for part in line))
        for line in console.render_lines(_table(rows, columns, max_name), pad=False)
    ]
    lines[0] = Text(lines[0].plain, "bold")
    for line in lines:
        line.rstrip()
    if left_out:
        counts = Counter(row["STATE"] for row in left_out)
        words = ", ".join(f"{number} {state}" for state, number in counts.most_common())
        lines.append(Text(cut(f"and {len(left_out)} more learners: {words}", width), "dim"))
    if "NOTE" not in [each.heading for each in columns]:
        notes = [f"{row['LEARNER']}: {row['NOTE']}" for row in rows if row["NOTE"]]
        lines += lines_of(text for note in notes for text in wrapped(note, width, "    ", "  "))
    return lines


def _fitting(rows: Sequence[Row], width: int | None, console: Console) -> tuple[list[UnitColumn], int | None]:
    """The columns that are shown, and how long a name may be there: at most what the other columns leave."""
    columns, unbounded = list(COLUMNS), console.options.update_width(WIDEST)
    if width is None:
        return columns, None

    def missing(max_name: int) -> int:
        return Measurement.get(console, unbounded, _table(rows, columns, max_name)).maximum - width

    for each in sorted((each for each in COLUMNS if each.gives_way is not None), key=lambda each: each.gives_way or 0):
        if missing(MAX_NAME) <= 0:
            break
        columns.remove(each)
    return columns, max(SHORTEST_NAME, MAX_NAME - max(0, missing(MAX_NAME)))


def _table(rows: Sequence[Row], columns: Sequence[UnitColumn], max_name: int | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for each in columns:
        table.add_column(
            each.heading,
            justify="left" if each.left else "right",
            no_wrap=True,
            max_width=max_name if each.heading == "LEARNER" else None,
        )
    for row in rows:
        cells = [Text(row.get(each.heading, "")) for each in columns]
        for cell, each in zip(cells, columns, strict=True):
            if each.heading == "STATE":
                cell.stylize(STYLE_OF.get(cell.plain, ""))
        table.add_row(*cells)
    return table


def _other_rows(status: Status) -> list[Row]:
    """Of the syncer and the standbys."""
    syncer = status.syncer
    if syncer is None:
        rows = [_other_row("syncer", "-", None, "not read in time" if "syncer" in status.partial else "not heard yet")]
    else:
        by = "" if syncer.unit == "syncer" else f" by {escaped(syncer.unit)}"
        rows = [
            _other_row("syncer", syncer.state, syncer.heard_s, f"epoch {syncer.epoch}{by}   {escaped(syncer.note)}")
        ]
    for standby in status.standbys:
        name = "(syncer)" if standby.name == "syncer" else standby.name  # the unit `syncer`, which serves no more
        note = f"on {escaped(standby.host)}   {escaped(standby.note)}"
        rows.append(_other_row(name, standby.state, standby.heard_s, note))
    return rows


def _other_row(name: str, state: str, heard_s: float | None, note: str) -> Row:
    return {"LEARNER": escaped(name), "STATE": escaped(state), "HEARD": age(heard_s), "NOTE": note.rstrip()}


MAX_POINTS = 512
SMALLEST_CHART, HIGHEST_CHART = 4, 10
FEWEST_EVENTS = 3  # with their heading
CURVE, AXIS = "cyan", r"[^ ]*[┤│]"
BLANK = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a character: by column, then by row from the top
Point = tuple[float, float]


class Curves:
    """The curves of one watched run, bounded. The log's state has the losses of the whole run, but only its newest
    merges: the pace is kept since the watch began, thinned like the losses."""

    def __init__(self) -> None:
        self.losses: list[Point] = []
        self.rates: list[Point] = []
        self._seen = -1

    def add(self, metrics: Metrics) -> None:
        self.losses = [(float(tokens), loss) for tokens, loss in metrics.losses]
        merges = metrics.recent_merges
        if not merges or merges[-1].n <= self._seen:
            return
        self._seen = merges[-1].n
        rate, tokens = rate_between(merges[0], merges[-1]), float(merges[-1].tokens)
        self.rates = [point for point in self.rates if point[0] < tokens]  # a rollback goes back
        if rate is not None:
            self.rates.append((tokens, rate))
        self.rates = thinned(self.rates, MAX_POINTS, lambda point: point[0])


@dataclass(frozen=True)
class LiveScreen:
    """Fits whatever size the terminal has when it is drawn. `trouble`: why the status is not newer."""

    status: Status
    curves: Curves
    trouble: str = ""
    max_lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.max_height if self.max_lines is None else min(self.max_lines, options.max_height)
        trouble = lines_of([cut(escaped(self.trouble), options.max_width)], BAD) if self.trouble else []
        lines = live_lines(self.status, self.curves, options.max_width, height - len(trouble))
        yield styled([*trouble, *lines])


def live_lines(status: Status, curves: Curves, width: int, height: int) -> list[Text]:
    """At most `height` lines. The verdict comes first; then curves, units and events share what is left."""
    head = head_lines(status, width)[: max(3, height // 3)]
    rest = rest_lines(status, width)
    left = height - len(head)
    charts = chart_lines(curves, width, min(HIGHEST_CHART, left // 3))
    left -= len(charts)
    units = _units(status, width, left - min(left // 3, FEWEST_EVENTS))
    left -= len(units)
    rest = rest[: max(0, left - (FEWEST_EVENTS if status.recent else 0))]
    left -= len(rest)
    events = recent_lines(status, None, left - 1)
    for line in events:
        line.truncate(width, overflow="ellipsis")
    return [*head, *charts, *units, *rest, *events][:height]


def _units(status: Status, width: int, room: int) -> list[Text]:
    """The table with as many learners as there is room for."""
    others = 2 + len(status.standbys)  # the heading, and the syncer
    found = unit_table(status, width)
    if len(found) > room:
        found = unit_table(status, width, max(1, room - others))
    return found[:room]


def chart_lines(curves: Curves, width: int, height: int) -> list[Text]:
    """The loss and the pace beside each other, by merged tokens; nothing where there is no curve yet, or no room."""
    if height < SMALLEST_CHART:
        return []
    half = (width - len(GAP)) // 2
    left = _chart("held-out loss by merged tokens", curves.losses, half, height, "{:.2f}".format, False)
    right = _chart("merged tok/s by merged tokens", curves.rates, half, height, format_count, True)
    if not left and not right:
        return []
    known = f"{curves.losses[-1][1]:.3f} (one so far)" if curves.losses else "not evaluated yet"
    left = left or [f"held-out loss: {known}"[:half]] + [""] * (height - 1)
    right = right or ["merged tok/s: more is to come"[:half]] + [""] * (height - 1)
    lines = [f"{one:<{half}}{GAP}{other}".rstrip() for one, other in zip(left, right, strict=True)]
    drawn = lines_of(lines[1:], CURVE)
    for line in drawn:
        line.highlight_regex(AXIS, "default")
    return [Text(lines[0], "bold"), *drawn]


def _chart(
    title: str, points: Sequence[Point], width: int, height: int, y_text: Callable[[float], str], from_zero: bool
) -> list[str]:
    if len(points) < 2 or points[0][0] >= points[-1][0]:
        return []
    return [title[:width], *line_chart(points, width, height - 1, format_count, y_text, from_zero)]


def line_chart(
    points: Sequence[Point],
    width: int,
    height: int,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    from_zero: bool = False,
) -> list[str]:
    """`height` lines of at most `width` Braille characters: the curve with its highest and lowest value, then the axis
    with its ends. Needs two points that differ in x; `points` are in the order of x."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(0.0 if from_zero else ys[0], *ys), max(ys)
    labels = {0: y_text(high), height - 2: y_text(low)}
    margin = max(map(len, labels.values()))
    columns, rows = width - margin - 1, height - 1
    cells = [[BLANK] * columns for _ in range(rows)]
    right, bottom = 2 * columns - 1, 4 * rows - 1
    x_scale, y_scale = right / (xs[-1] - xs[0]), bottom / ((high - low) or 1.0)
    scaled = [(x_scale * (x - xs[0]), y_scale * (high - y)) for x, y in points]
    for x, y in _joined(scaled):
        cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
    lines = [
        f"{labels.get(row, ''):>{margin}}{'┤' if row in labels else '│'}"
        + "".join(map(chr, line)).replace(chr(BLANK), " ").rstrip()
        for row, line in enumerate(cells)
    ]
    first, last = x_text(xs[0]), x_text(xs[-1])
    return [*lines, f"{'':>{margin}} {first}{last:>{max(0, columns - len(first))}}"]


def _joined(points: Sequence[Point]) -> Iterator[tuple[int, int]]:
    """Every dot on the lines from one point to the next."""
    for (x0, y0), (x1, y1) in pairwise(points):
        steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for step in range(steps + 1):
            yield round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)
