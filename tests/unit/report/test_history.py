"""A log folded into series: bounded and complete; what happened, and the table."""

from __future__ import annotations

from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.clock import wall_s
from diloco_cli.errors import DataCheckError
from diloco_cli.events.bucket import EventReader
from diloco_cli.events.event import FreshEvent, encode_batch
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import commit_key, event_key
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.quantities import parse_time
from diloco_cli.report.history import (
    MAX_POINTS,
    RESTART,
    Mark,
    RunHistory,
    csv_of,
    marks_of,
    rates,
    read_history,
    stretches,
)
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.local import LocalStore
from diloco_cli.store.memory import MemoryStore
from tests.benchmarks import resume
from tests.unit.protocol.records import KINDS, applied, output

PARAMETERS = (6, 4)


def at(s: float) -> str:
    return f"2026-01-01T{int(s // 3600):02d}:{int(s % 3600 // 60):02d}:{s % 60:06.3f}Z"


def add(history: RunHistory, kind: str, s: float, **fields: Any) -> None:
    n = history.n + 1
    history.add(KINDS[kind](**{"n": n, "epoch": 1, "time": at(s), **fields}), f"d{n}")


def begun() -> RunHistory:
    history = RunHistory(PARAMETERS)
    add(history, "epoch_start", 0)
    return history


def merge(
    history: RunHistory, s: float, *names: str, incarnation: int = 1, tokens: int = 100, slot_s: float = 1.0
) -> None:
    inputs = tuple(applied(name, incarnation=incarnation, tokens=tokens, payload_bytes=7) for name in names)
    outputs = (output(history.n % 2, history.n + 1, 0),)
    add(history, "merge", s, slot=0, inputs=inputs, outputs=outputs, alive=3, slot_s=slot_s)


def test_tokens_are_counted_as_the_state_counts_them() -> None:
    history = begun()
    for second in range(1, 5):
        merge(history, second, "iowa", "rhine")
    assert history.token_parameters == 2 * 100 * (6 + 4) * 2 and history.tokens == 400
    assert {name: took.merges for name, took in history.learners.items()} == {"iowa": 4, "rhine": 4}
    assert history.learners["iowa"].payload_bytes == 28


def test_any_length_gives_a_bounded_number_of_points_and_loses_no_merge() -> None:
    history = begun()
    for number in range(5000):
        merge(history, number, "iowa", *(["rhine"] if number % 2 else []))
    found = stretches(history, 240)
    assert 230 < len(found) <= 240 and all(a.end_s == b.start_s for a, b in pairwise(found))
    assert sum(one.merges for one in found) == 5000 and sum(one.by["rhine"] for one in found) == 2500
    assert {one.fewest for one in found} == {1} and found[-1].tokens == history.tokens
    rows = [line.split(",") for line in csv_of(history).splitlines()[1:]]
    assert 1000 < len(rows) <= MAX_POINTS and sum(int(row[2]) for row in rows) == 5000
    assert rows[0][0] == "4.0" and rows[-1][1] == str(history.tokens)


def test_a_pause_of_many_slots_is_an_outage_and_a_gap_in_the_curve() -> None:
    history = begun()
    for second in [*range(1, 100), *range(200, 300)]:
        merge(history, second, "iowa")
    assert history.outages == [(99.0, 200.0)]
    found = rates(history)
    assert any(isnan(rate) for s, rate in found if 110 < s < 190), "the line is broken there"
    assert not any(isnan(rate) for s, rate in found if s < 95 or s > 205)


def test_slow_slots_are_no_outages() -> None:
    history = begun()
    for number in range(50):
        merge(history, 60.0 * (number + 1), "iowa", slot_s=60.0)
    assert history.outages == [] and all(one.merges for one in stretches(history, 240))


def test_the_first_syncers_epoch_and_that_of_a_resumed_run_and_of_a_command_are_no_takeovers() -> None:
    history = begun()
    add(history, "epoch_start", 0, epoch=2)  # commit 0 was the launch's
    merge(history, 1, "iowa")
    add(history, "epoch_start", 2, epoch=3, serves=False)
    add(history, "stop", 3)
    add(history, "epoch_start", 4, epoch=4)
    assert history.takeovers == 0
    merge(history, 5, "iowa")
    add(history, "epoch_start", 6, epoch=5)
    add(history, "epoch_start", 7, epoch=6)
    assert history.takeovers == 2


def test_a_higher_incarnation_is_a_restart_and_a_second_syncers_epoch_a_takeover() -> None:
    history = begun()
    merge(history, 1, "iowa")
    merge(history, 2, "iowa", incarnation=3)
    add(history, "epoch_start", 3, epoch=2)
    assert (history.learners["iowa"].restarts, history.takeovers) == (1, 1)
    assert [(mark.kind, mark.unit, mark.s) for mark in history.marks] == [
        ("serving", "syncer", 0.0), (RESTART, "iowa", 2.0), ("serving", "syncer", 3.0),
    ]  # fmt: skip


def test_a_new_process_after_a_stop_is_no_restart_and_the_next_one_is() -> None:
    history = begun()
    merge(history, 1, "iowa")
    add(history, "stop", 2)
    for second, incarnation, restarts in ((3, 2, 0), (4, 2, 0), (5, 3, 1)):
        merge(history, second, "iowa", incarnation=incarnation)
        assert history.learners["iowa"].restarts == restarts


def test_a_rollback_takes_tokens_and_losses_back() -> None:
    history = begun()
    for second in range(1, 5):
        merge(history, second, "iowa")
        add(history, "eval", second, evaluated=1, loss=2.0, tokens=history.tokens)
    tokens = [point.tokens for point in history.losses]
    half = tokens[1]
    add(history, "rollback", 6, to=2, outputs=(), shares=(("iowa", half * sum(PARAMETERS)),))
    assert history.tokens == half and [point.tokens for point in history.losses] == tokens[:2]
    merge(history, 7, "iowa")
    assert not any(rate < 0 for _, rate in rates(history))


@pytest.mark.parametrize("time", ["", "yesterday", "9999-99-99", "0001-01-01T00:00:00+23:59"])
def test_times_that_are_none_break_nothing(time: str) -> None:
    assert parse_time(time) is None
    history = begun()
    add(history, "skip", 0, slot=0, time=time)
    assert history.skips == 1 and history.span_s == 0.0


COMMITS = 150


@pytest.fixture
def log(tmp_path: Path) -> Path:
    resume.build(tmp_path / "log", COMMITS)
    return tmp_path / "log"


def read(log: Path, run: RunFormat | None = None, state: RunState | None = None) -> tuple[RunHistory, RunState]:
    run, store = run or resume.make_run(), LocalStore(log)
    state = state or perform(read_log(run), store, SystemClock(lambda: 0.0, lambda s: None, lambda: None))
    return read_history(store, run, state), state


def test_a_history_agrees_with_the_state(log: Path) -> None:
    history, state = read(log)
    assert (history.token_parameters, len(history.merges)) == (state.token_parameters, state.merges)
    assert (history.n, history.digest) == (state.n, state.digest)


def test_a_history_goes_on_from_what_is_known(log: Path) -> None:
    """Commits that were read are not read again."""
    whole, state = read(log)
    run, store, clock = resume.make_run(), LocalStore(log), SystemClock(lambda: 0.0, lambda s: None, lambda: None)
    gone = log / commit_key(state.n)
    last = gone.read_bytes()
    gone.unlink()
    known = read_history(store, run, perform(read_log(run), store, clock))
    gone.write_bytes(last)
    for n in range(state.n):
        (log / commit_key(n)).unlink()
    found = read_history(store, run, state, known=known)
    assert found is known and vars(found) == vars(whole)


def test_a_changed_or_missing_commit_is_found_by_the_chain(log: Path) -> None:
    _, state = read(log)
    path = log / commit_key(7)
    path.write_bytes(path.read_bytes().replace(b'"tokens":1000', b'"tokens":9999'))
    with pytest.raises(DataCheckError, match="chain"):
        read(log, state=state)
    path.unlink()
    with pytest.raises(DataCheckError, match="missing"):
        read(log, state=state)


def test_a_restart_is_told_once_and_what_processes_say_stands_between() -> None:
    history, store = begun(), MemoryStore()
    history.started_s = wall_s() - 100.0
    said = [
        FreshEvent(-6.0, "started", "process 7"),
        FreshEvent(60.0, "chaos", "kill"),
        FreshEvent(62.0, RESTART, "again"),
        FreshEvent(63.0, "merged", "routine"),
    ]
    store.put(event_key("iowa", 0, "a"), encode_batch(said, 100.0))
    history.marks = [
        Mark(0.0, "serving", "syncer", "epoch 1"),
        Mark(10.0, "serving", "syncer", "epoch 2"),
        Mark(30.0, RESTART, "iowa", "takes part again"),
        Mark(75.0, RESTART, "iowa", "takes part again"),
        Mark(76.0, RESTART, "rhine", "takes part again"),
    ]
    found = [(round(mark.s), mark.kind, mark.unit) for mark in marks_of(history, EventReader().read(store))]
    assert found == [
        (0, "started", "iowa"), (0, "serving", "syncer"), (10, "serving", "syncer"), (30, RESTART, "iowa"),
        (60, "chaos", "iowa"), (62, RESTART, "iowa"), (76, RESTART, "rhine"),
    ]  # fmt: skip
