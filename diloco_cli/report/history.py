"""A run's whole log, read once: the series that a report draws, and the table that it writes.

Curves and the table have a bounded number of points, whatever the log's length: merges are summed over stretches of one
width. Times are seconds since the first commit. Nothing is verified a second time: the caller has the log's end from a
reader that checks it, and the records before it are chained to that by their digests.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import nan
from statistics import median
from typing import Any, NamedTuple, Union

import msgspec

from diloco_cli.errors import DataCheckError
from diloco_cli.events.event import EVENT_KINDS, KINDS, Event, events_of
from diloco_cli.protocol.log.commits import Commit, EpochStart, Evaluation, Merge, Rollback, Skip, Stop, metrics_after
from diloco_cli.protocol.log.keys import commit_key, number_of
from diloco_cli.protocol.log.metrics import Metrics, thinned
from diloco_cli.protocol.log.records import RunFormat, record_digest
from diloco_cli.protocol.log.state import RunState
from diloco_cli.quantities import parse_time
from diloco_cli.runtime.daemon import commits_ahead
from diloco_cli.signing import body_of
from diloco_cli.store.port import Store

MAX_POINTS = 2000
MAX_MARKS = 2000
SHORTEST_OUTAGE_S = 10.0
OUTAGE_SLOTS = 5  # slots without a merge, beyond which nobody would speak of a slow one
MERGES_A_STRETCH = 4  # so that the time between two merges does not show as an outage
RESTART = "restarted"
TWIN_S = 120.0  # a restarted learner takes part again at most so much later
TOLD_EVERY = 512
VERIFY = "diloco verify"
NOTABLE = {kind.note for kind in EVENT_KINDS if kind.note and not kind.routine} - {"eval", "gc_floor"}
"""Kinds of commits whose events are always marked; an evaluation is if the loss jumped."""
HEADINGS = ("time_s", "tokens", "merges", "participants_mean", "participants_min", "alive_mean", "loss")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Mark:
    """Something that happened `s` seconds after the first commit."""

    s: float
    kind: str
    unit: str
    text: str


class MergePoint(NamedTuple):
    """`tokens`: the run's after it."""

    s: float
    tokens: int
    alive: int
    learners: tuple[str, ...]


class Loss(NamedTuple):
    s: float
    tokens: int
    loss: float


@dataclass
class Took:
    """What the log says of one learner. Payload bytes include merged offers alone. `restarts`: how often it took part
    again with a new process, but for those of a stopped run; `stops`: of the run, before its newest merge."""

    incarnation: int
    stops: int = 0
    merges: int = 0
    token_parameters: int = 0
    payload_bytes: int = 0
    restarts: int = 0


@dataclass
class Stretch:
    """The merges from `start_s` to `end_s`. `participants` and `alive` are sums over them, `by` says in how many of
    them each learner took part; `tokens` are the run's after them."""

    start_s: float
    end_s: float
    tokens: int = 0
    merges: int = 0
    participants: int = 0
    fewest: int = 0
    alive: int = 0
    by: Counter[str] = field(default_factory=Counter)

    def add(self, merge: MergePoint) -> None:
        count = len(merge.learners)
        self.fewest = min(self.fewest, count) if self.merges else count
        self.tokens = merge.tokens
        self.merges += 1
        self.participants += count
        self.alive += max(merge.alive, count)
        self.by.update(merge.learners)


@dataclass
class RunHistory:
    """All commits up to `n`, whose digest is `digest`. `refused`: offers, by reason."""

    parameters: tuple[int, ...]
    n: int = -1
    digest: str = ""
    is_served: bool = False  # since the last stop
    takeovers: int = 0
    rollbacks: int = 0
    stops: int = 0
    skips: int = 0
    started_s: float = 0.0
    span_s: float = 0.0
    token_parameters: int = 0
    merges: list[MergePoint] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    learners: dict[str, Took] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        return self.token_parameters // max(1, sum(self.parameters))

    def participation(self, learner: str) -> float:
        """The share of the merges in which it took part."""
        return self.learners[learner].merges / len(self.merges) if learner in self.learners else 0.0

    def add(self, commit: Commit, digest: str) -> None:
        at_s = parse_time(commit.time) or 0.0
        if self.n < 0:
            self.started_s = at_s
        s = max(0.0, at_s - self.started_s)
        self.n, self.digest, self.span_s = commit.n, digest, max(self.span_s, s)
        self.refused.update(outcome.reason for outcome in commit.outcomes)
        match commit:
            case EpochStart():  # the run's first, and the one of a resumed run, take nothing over
                self.takeovers += commit.serves and self.is_served
            case Merge():
                self.is_served = True
                self._merge(commit, s)
            case Skip():
                self.is_served = True
                self.skips += 1
            case Evaluation() if commit.loss is not None:
                self.losses.append(Loss(s, commit.tokens, commit.loss))
            case Rollback():
                self._roll_back(dict(commit.shares))
            case Stop():
                self.is_served = False
                self.stops += 1
        if commit.kind in NOTABLE or (isinstance(commit, Evaluation) and commit.jumped):
            events = events_of(metrics_after(Metrics(), commit, 0))
            self.marks += [Mark(s, event.kind, event.unit, event.text) for event in events if is_told(event)]

    def _merge(self, commit: Merge, s: float) -> None:
        since_s = self.merges[-1].s if self.merges else s
        s = max(s, since_s)
        if s - since_s > max(SHORTEST_OUTAGE_S, OUTAGE_SLOTS * commit.slot_s):
            self.outages.append((since_s, s))
        parameters = self.parameters[commit.outputs[0].fragment]
        for item in commit.inputs:
            took = self.learners.setdefault(item.learner, Took(item.incarnation, self.stops))
            took.merges += 1
            took.token_parameters += item.counted * parameters
            took.payload_bytes += item.payload_bytes
            self.token_parameters += item.counted * parameters
            if item.incarnation > took.incarnation:
                took.restarts += took.stops == self.stops
                took.incarnation, took.stops = item.incarnation, self.stops
                again = f"takes part again, as incarnation {number_of(item.incarnation)}"
                self.marks.append(Mark(s, RESTART, item.learner, again))
        learners = tuple(item.learner for item in commit.inputs)
        self.merges.append(MergePoint(s, self.tokens, commit.alive, learners))

    def _roll_back(self, shares: dict[str, int]) -> None:
        self.rollbacks += 1
        self.token_parameters = sum(shares.values())
        for name, took in self.learners.items():
            took.token_parameters = shares.get(name, 0)
        self.losses = [point for point in self.losses if point.tokens <= self.tokens]


def is_told(event: Event) -> bool:
    return not KINDS[event.kind].routine


def stretches(history: RunHistory, most: int) -> list[Stretch]:
    """At most `most` of them up to the last merge, without a gap between two."""
    if not history.merges:
        return []
    times = [merge.s for merge in history.merges]
    usual_s = median([b - a for a, b in pairwise(times)] or [0.0])
    width_s = max(1.0, times[-1] / (most - 1), MERGES_A_STRETCH * usual_s)
    found = [Stretch(i * width_s, (i + 1) * width_s) for i in range(1 + int(times[-1] // width_s))]
    for merge in history.merges:
        found[int(merge.s // width_s)].add(merge)
    return found


def rates(history: RunHistory, most: int = 240) -> list[tuple[float, float]]:
    """(seconds, merged tokens per second); not a number where nothing merged, so that a line has a gap there. What a
    rollback takes away is no rate below 0."""
    found, before = [], 0
    for stretch in stretches(history, most):
        rate = max(0, stretch.tokens - before) / (stretch.end_s - stretch.start_s) if stretch.merges else nan
        found.append(((stretch.start_s + stretch.end_s) / 2, rate))
        before = stretch.tokens if stretch.merges else before
    return found


# -- reading the log ----------------------------------------------------------------------------------------------


_read: Callable[[bytes], Any] = msgspec.json.Decoder(Union[tuple(Commit.__subclasses__())]).decode  # noqa: UP007


def read_history(
    store: Store,
    run: RunFormat,
    state: RunState,
    progress: Progress = lambda n, of: None,
    known: RunHistory | None = None,
) -> RunHistory:
    """The commits up to that of `state`; of a `known` history those behind it, which it then has. Raises DataCheckError
    where they do not lead to that commit."""
    history = known or RunHistory(tuple(fragment.num_parameters for fragment in run.layout.fragments))
    for data in commits_ahead(store, history.n + 1, state.n):
        _add(history, history.n + 1, data)
        if history.n % TOLD_EVERY == 0:
            progress(history.n, state.n)
    if history.n < state.n:
        raise DataCheckError("this commit is missing", where=commit_key(history.n + 1), hint=VERIFY)
    if history.digest != state.digest:
        raise DataCheckError("the commits do not lead to the log's end", where=commit_key(state.n), hint=VERIFY)
    history.losses = thinned(history.losses, MAX_POINTS, lambda loss: loss.s)
    return history


def _add(history: RunHistory, n: int, data: bytes) -> None:
    try:
        commit = _read(body_of(data))
        if (commit.n, commit.previous) != (n, history.digest):
            raise DataCheckError("the hash chain is broken", where=commit_key(n), hint=VERIFY)
        history.add(commit, record_digest(data))
    except (msgspec.MsgspecError, IndexError, OverflowError, RecursionError) as error:
        raise DataCheckError(f"not a commit: {error}", where=commit_key(n), hint=VERIFY) from error


# -- what happened, and the table ---------------------------------------------------------------------------------


def marks_of(history: RunHistory, written: list[Event]) -> list[Mark]:
    """In the order of their times. A restart that its supervisor tells of is not told by the log again. What came
    before the first commit is told as of that. `written`: the events that processes wrote."""
    told = [
        Mark((parse_time(event.time) or 0.0) - history.started_s, event.kind, event.unit, event.text)
        for event in written
        if is_told(event)
    ]
    restarts = [mark for mark in told if mark.kind == RESTART]
    by_log = [mark for mark in history.marks if not (mark.kind == RESTART and _has_twin(mark, restarts))]
    return [replace(mark, s=max(0.0, mark.s)) for mark in sorted([*by_log, *told], key=lambda mark: mark.s)]


def _has_twin(mark: Mark, restarts: list[Mark]) -> bool:
    return any(other.unit == mark.unit and 0 <= mark.s - other.s + 1 <= TWIN_S for other in restarts)


def csv_of(history: RunHistory) -> str:
    """The series as CSV: a row for each stretch in which something merged or was evaluated. `tokens` are those merged
    by then; `loss` is the newest of its stretch."""
    width_s = 1.0
    while history.span_s >= MAX_POINTS * width_s:
        width_s *= 2
    found: dict[int, Stretch] = {}
    for merge in history.merges:
        found.setdefault(int(merge.s / width_s), Stretch(0.0, 0.0)).add(merge)
    losses = {int(point.s / width_s): point.loss for point in history.losses}
    stream, tokens = io.StringIO(), 0
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(HEADINGS)
    for index in sorted(found.keys() | losses.keys()):
        stretch = found.get(index)
        tokens = stretch.tokens if stretch else tokens
        writer.writerow([(index + 1) * width_s, tokens, *_merged(stretch), losses.get(index, "")])
    return stream.getvalue()


def _merged(stretch: Stretch | None) -> list[object]:
    if stretch is None:
        return [0, "", "", ""]
    mean, alive = (round(total / stretch.merges, 4) for total in (stretch.participants, stretch.alive))
    return [stretch.merges, mean, stretch.fewest, alive]
