"""A run's whole log, folded into series of bounded length: what a report draws, and the table that it writes.

Time is cut into bins of one width, in seconds since the first commit that is kept; when there are too many, two
neighbours become one and the width doubles. So a log of any length gives at most MAX_POINTS points a series, and newer
commits can be added to a history that was kept. Each commit is read once, and never again on this machine. Nothing is
verified a second time: the caller has the log's end from a reader that checks it, and the records before it are chained
to that by their digests.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from math import nan
from pathlib import Path

import msgspec
from msgspec import Struct, field

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, UsageError
from diloco_cli.events.event import EVENT_KINDS, KINDS, Event, events_of
from diloco_cli.paths import user_cache_directory
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import commit_key, number_of
from diloco_cli.protocol.log.metrics import Metrics, metrics_after, thinned
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, decode, record_digest
from diloco_cli.runtime.daemon import CommitsAhead
from diloco_cli.runtime.files import make_directory, write_whole
from diloco_cli.signing import body_of
from diloco_cli.store.port import Store
from diloco_cli.units import parse_time

MAX_POINTS = 2000
MAX_MARKS = 2000
MAX_OUTAGES = 200
SHORTEST_OUTAGE_S = 10.0
OUTAGE_SLOTS = 5  # slots without a merge, beyond which nobody would speak of a slow one
MERGES_A_STRETCH = 4
RESTART = "restarted"
TWIN_S = 120.0  # a restarted learner takes part again at most so much later
TOLD_EVERY = 512
VERIFY = "diloco verify"
NOTABLE = {kind.note for kind in EVENT_KINDS if kind.note and not kind.routine} - {"eval", "gc_floor"}
"""Kinds of commits whose events are always marked; an evaluation is if the loss jumped."""
VERSION = 2  # of the kept files; others are read anew
MAX_KEPT_BYTES = 64 << 20
HEADINGS = ("time_s", "tokens", "merges", "participants_mean", "participants_min", "alive_mean", "loss")
Progress = Callable[[int, int], None]


class MergedInput(Struct, gc=False):
    learner: str
    incarnation: int
    tokens: int
    payload_bytes: int


class MergedOutput(Struct, gc=False):
    fragment: int


class RefusedOffer(Struct, gc=False):
    learner: str
    reason: str


class CommitLine(Struct, gc=False):
    """What a report needs of a commit, of whatever kind. It is decoded four times a millisecond faster than the whole
    record, which 100,000 commits make 13 seconds."""

    kind: str
    n: int
    epoch: int
    previous: str
    time: str
    inputs: tuple[MergedInput, ...] = ()
    outputs: tuple[MergedOutput, ...] = ()
    outcomes: tuple[RefusedOffer, ...] = ()
    alive: int = 0
    slot_s: float = 0.0
    evaluated: int | None = None
    loss: float | None = None
    jumped: bool = False
    tokens: int = 0
    shares: tuple[tuple[str, int], ...] = ()


class Mark(Struct):
    """Something that happened `s` seconds after the first commit."""

    s: float
    kind: str
    unit: str
    text: str


class Bin(Struct):
    """The merges of one stretch of time. `tokens` are the run's after them; `participants` and `alive` are sums over
    the merges, `by` says in how many of them each learner took part."""

    tokens: int = 0
    merges: int = 0
    participants: int = 0
    fewest: int = 0
    alive: int = 0
    by: dict[str, int] = field(default_factory=dict)

    def join(self, later: Bin) -> None:
        self.fewest = min(self.fewest, later.fewest) if self.merges and later.merges else self.fewest or later.fewest
        self.tokens = later.tokens
        self.merges += later.merges
        self.participants += later.participants
        self.alive += later.alive
        for learner, merges in later.by.items():
            self.by[learner] = self.by.get(learner, 0) + merges


class Took(Struct):
    """What the log says of one learner. Payload bytes include merged offers alone. `restarts`: how often it took part
    again with a new process, but for those of a stopped run; `stops`: of the run, before its newest merge."""

    merges: int = 0
    token_parameters: int = 0
    payload_bytes: int = 0
    incarnation: int = 0
    restarts: int = 0
    stops: int = 0


class Loss(Struct):
    s: float
    tokens: int
    loss: float


class RunHistory(Struct):
    """All commits up to `n`, whose digest is `digest`. `missing`: commits that the bucket does not hold any more;
    `first`: the first that it does; `tokens_before`: merged in those that are missing."""

    run_id: str
    parameters: tuple[int, ...]
    n: int = -1
    digest: str = ""
    first: int | None = None
    missing: int = 0
    epoch: int = 0
    takeovers: int = 0
    rollbacks: int = 0
    stops: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    first_merge_s: float | None = None
    last_merge_s: float | None = None
    merges: int = 0
    skips: int = 0
    token_parameters: int = 0
    tokens_before: int = 0
    width_s: float = 1.0
    bins: dict[int, Bin] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    marks_left_out: int = 0
    outages: list[tuple[float, float]] = field(default_factory=list)
    learners: dict[str, Took] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.token_parameters // max(1, sum(self.parameters))

    def participation(self, learner: str) -> float:
        """Of the kept merges, the share in which it took part."""
        return self.learners[learner].merges / self.merges if learner in self.learners else 0.0

    @property
    def span_s(self) -> float:
        return max(0.0, self.ended_s - self.started_s)

    def add(self, line: CommitLine, digest: str) -> float:
        """One more commit; the seconds at which it was made are returned."""
        at_s = parse_time(line.time) or 0.0
        if self.first is None:
            self.first, self.started_s, self.epoch = line.n, at_s, line.epoch
        s = max(0.0, at_s - self.started_s)
        self.n, self.digest, self.ended_s = line.n, digest, max(self.ended_s, at_s)
        self.takeovers += line.epoch > self.epoch
        self.epoch = max(self.epoch, line.epoch)
        for refused in line.outcomes:
            self.refused[refused.reason] = self.refused.get(refused.reason, 0) + 1
        match line.kind:
            case "merge":
                self._merge(line, s)
            case "skip":
                self.skips += 1
            case "eval" if line.loss is not None:
                self.losses = thinned([*self.losses, Loss(s, line.tokens, line.loss)], MAX_POINTS, lambda loss: loss.s)
            case "rollback":
                self._roll_back(dict(line.shares))
            case "stop":
                self.stops += 1
        return s

    def mark(self, mark: Mark) -> None:
        """When there are too many, every second restart goes first."""
        self.marks.append(mark)
        if len(self.marks) <= MAX_MARKS:
            return
        dropped = {id(m) for m in [m for m in self.marks if m.kind == RESTART][::2] or self.marks[::2]}
        self.marks = [m for m in self.marks if id(m) not in dropped]
        self.marks_left_out += len(dropped)

    def _merge(self, line: CommitLine, s: float) -> None:
        since_s = self.last_merge_s
        if since_s is None:
            self.first_merge_s = s
        elif s - since_s > max(SHORTEST_OUTAGE_S, OUTAGE_SLOTS * line.slot_s):
            self.outages = sorted([*self.outages, (since_s, s)], key=_length)[-MAX_OUTAGES:]
        self.last_merge_s = s if since_s is None else max(s, since_s)
        self.merges += 1
        parameters = self.parameters[line.outputs[0].fragment]
        bin_ = self._bin(s)
        for item in line.inputs:
            took = self.learners.get(item.learner)
            if took is None:
                took = self.learners[item.learner] = Took(incarnation=item.incarnation, stops=self.stops)
            took.merges += 1
            took.token_parameters += item.tokens * parameters
            took.payload_bytes += item.payload_bytes
            self.token_parameters += item.tokens * parameters
            if item.incarnation > took.incarnation:
                took.restarts += took.stops == self.stops
                took.incarnation, took.stops = item.incarnation, self.stops
                self.mark(
                    Mark(s, RESTART, item.learner, f"takes part again, as incarnation {number_of(item.incarnation)}")
                )
            bin_.by[item.learner] = bin_.by.get(item.learner, 0) + 1
        count = len(line.inputs)
        bin_.fewest = min(bin_.fewest, count) if bin_.merges else count
        bin_.merges += 1
        bin_.participants += count
        bin_.alive += max(line.alive, count)
        bin_.tokens = self.tokens

    def _bin(self, s: float) -> Bin:
        while s >= MAX_POINTS * self.width_s:
            self._halve()
        return self.bins.setdefault(int(s / self.width_s), Bin())

    def _halve(self) -> None:
        before, self.bins = self.bins, {}
        self.width_s *= 2
        for index in sorted(before):
            if index // 2 in self.bins:
                self.bins[index // 2].join(before[index])
            else:
                self.bins[index // 2] = before[index]

    def _roll_back(self, shares: dict[str, int]) -> None:
        self.rollbacks += 1
        self.token_parameters = sum(shares.values())
        for name, took in self.learners.items():
            took.token_parameters = shares.get(name, 0)
        self.losses = [point for point in self.losses if point.tokens <= self.tokens]


def _length(outage: tuple[float, float]) -> float:
    return outage[1] - outage[0]


def stretches(history: RunHistory, most: int) -> list[tuple[float, float, Bin]]:
    """(from, to, what was merged then), at most `most` of them, without a gap between two. They are at least as long as
    a few merges take, so that the time between two merges does not show as an outage."""
    indices = sorted(history.bins)
    if not indices:
        return []
    end = indices[-1] + 1
    span = max(1, -(-end // most), MERGES_A_STRETCH * _typical_distance(indices))
    found = [(s * history.width_s, min(s + span, end) * history.width_s, Bin()) for s in range(0, end, span)]
    for index in indices:
        found[index // span][2].join(history.bins[index])
    return found


def rates(history: RunHistory, most: int = 240) -> list[tuple[float, float]]:
    """(seconds, merged tokens per second); not a number where nothing merged, so that a line has a gap there. What a
    rollback takes away is no rate below 0."""
    found, before = [], 0
    for start_s, end_s, bin_ in stretches(history, most):
        rate = max(0, bin_.tokens - before) / (end_s - start_s) if bin_.merges else nan
        found.append(((start_s + end_s) / 2, rate))
        before = bin_.tokens if bin_.merges else before
    return found


def _typical_distance(indices: Sequence[int]) -> int:
    """Between two bins that hold merges."""
    distances = sorted(b - a for a, b in pairwise(indices))
    return distances[len(distances) // 2] if distances else 1


# -- reading the log ----------------------------------------------------------------------------------------------


_line = msgspec.json.Decoder(CommitLine).decode


class KeptHistory(Struct):
    version: int
    history: RunHistory


def read_history(
    store: Store, run: RunFormat, state: RunState, progress: Progress = lambda done, of: None
) -> RunHistory:
    """The commits up to that of `state`. Raises DataCheckError where they do not lead to it."""
    path = user_cache_directory("report") / f"{digest(run.run_id.encode()).partition('-')[2]}.json"
    history = _kept(path, run, state)
    if history is not None and history.n < state.n and not _continues(store, history):
        history = None
    history = history or RunHistory(run.run_id, _parameters(run))
    read = history.n
    with CommitsAhead(store, last=state.n) as ahead:
        for n in range(read + 1, state.n + 1):
            _add(history, n, ahead.get(commit_key(n), MAX_RECORD_BYTES))
            if n % TOLD_EVERY == 0:
                progress(n, state.n)
    if history.digest != state.digest:
        raise DataCheckError("the kept commits do not lead to the log's end", where=commit_key(state.n), hint=VERIFY)
    history.tokens_before = state.tokens(run.layout) - history.tokens
    if history.n > read:
        _keep(path, history)
    return history


def _parameters(run: RunFormat) -> tuple[int, ...]:
    return tuple(fragment.num_parameters for fragment in run.layout.fragments)


def _add(history: RunHistory, n: int, data: bytes | None) -> None:
    if data is None:
        history.missing += 1
        history.digest = ""
        return
    try:
        line = _line(body_of(data))
        if history.digest and (line.previous != history.digest or line.n != n):
            raise DataCheckError("the hash chain is broken", where=commit_key(n), hint=VERIFY)
        s = history.add(line, record_digest(data))
    except (msgspec.MsgspecError, IndexError, OverflowError, RecursionError) as error:
        raise DataCheckError(f"not a commit: {error}", where=commit_key(n), hint=VERIFY) from error
    if line.kind in NOTABLE or line.jumped:
        for event in events_of(metrics_after(Metrics(), decode(Commit, data, commit_key(n)), 0)):
            if not KINDS[event.kind].routine:
                history.mark(Mark(s, event.kind, event.unit, event.text))


def _kept(path: Path, run: RunFormat, state: RunState) -> RunHistory | None:
    """What an earlier report left here, if it is of this very log."""
    try:
        if path.stat().st_size > MAX_KEPT_BYTES:
            return None
        kept = msgspec.json.decode(path.read_bytes(), type=KeptHistory, strict=False)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    history = kept.history
    fits = kept.version == VERSION and history.run_id == run.run_id and history.parameters == _parameters(run)
    if not fits or history.n > state.n or (history.n == state.n and history.digest != state.digest):
        return None
    return history


def _continues(store: Store, history: RunHistory) -> bool:
    """Whether the log goes on from what was kept: a bucket may have been restored from an older copy."""
    data = store.get(commit_key(history.n), MAX_RECORD_BYTES)
    return data is None or record_digest(data) == history.digest


def _keep(path: Path, history: RunHistory) -> None:
    """A report does not fail because nothing can be kept."""
    with suppress(OSError, UsageError):
        make_directory(path.parent)
        write_whole(path, msgspec.json.encode(KeptHistory(VERSION, history)))


# -- what happened, and the table ---------------------------------------------------------------------------------


def marks_of(history: RunHistory, written: list[Event]) -> list[Mark]:
    """In the order of their times. A restart that its supervisor tells of is not told by the log again. What came
    before the first commit is told as of that. `written`: the events that processes wrote."""
    told = [
        Mark((parse_time(event.time) or 0.0) - history.started_s, event.kind, event.unit, event.text)
        for event in written
        if not KINDS[event.kind].routine
    ]
    restarts = [mark for mark in told if mark.kind == RESTART]
    by_log = [mark for mark in history.marks if not (mark.kind == RESTART and _has_twin(mark, restarts))]
    found = sorted([*by_log, *told], key=lambda mark: mark.s)[-MAX_MARKS:]
    return [Mark(max(0.0, mark.s), mark.kind, mark.unit, mark.text) for mark in found]


def _has_twin(mark: Mark, restarts: list[Mark]) -> bool:
    return any(other.unit == mark.unit and 0 <= mark.s - other.s + 1 <= TWIN_S for other in restarts)


def csv_of(history: RunHistory) -> str:
    """The series as CSV. Rows end on the history's bins; those without a merge or a loss are left out. `tokens` are
    those merged by then; `loss` is the newest of its row's time."""
    losses = {int(point.s / history.width_s): point.loss for point in history.losses}
    stream, tokens = io.StringIO(), 0
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(HEADINGS)
    for index in sorted(history.bins.keys() | losses.keys()):
        bin_ = history.bins.get(index)
        tokens = bin_.tokens if bin_ is not None else tokens
        writer.writerow(
            [(index + 1) * history.width_s, history.tokens_before + tokens, *_merged(bin_), losses.get(index, "")]
        )
    return stream.getvalue()


def _merged(bin_: Bin | None) -> list[object]:
    if bin_ is None:
        return [0, "", "", ""]
    mean, alive = (round(total / bin_.merges, 4) for total in (bin_.participants, bin_.alive))
    return [bin_.merges, mean, bin_.fewest, alive]
