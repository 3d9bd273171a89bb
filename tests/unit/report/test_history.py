"""A log folded into series: bounded, complete, the same whether it is read at once or bit by bit; each commit is read
once; what happened, and the table."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest

from diloco_cli.clock import wall_s
from diloco_cli.errors import DataCheckError
from diloco_cli.events.bucket import EventReader
from diloco_cli.events.event import FreshEvent, encode_batch
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import commit_key, event_key
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.report.history import (
    MAX_MARKS,
    MAX_POINTS,
    RESTART,
    CommitLine,
    Mark,
    RunHistory,
    csv_of,
    marks_of,
    rates,
    read_history,
    stretches,
)
from diloco_cli.report.history import MergedInput as In
from diloco_cli.report.history import MergedOutput as Out
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.local import LocalStore
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.wrappers import MeteredStore
from diloco_cli.units import parse_time
from tests.benchmarks import resume

PARAMETERS = (6, 4)


def at(s: float) -> str:
    return f"2026-01-01T{int(s // 3600):02d}:{int(s % 3600 // 60):02d}:{s % 60:06.3f}Z"


def begun() -> RunHistory:
    history = RunHistory("id", PARAMETERS)
    history.add(CommitLine("epoch_start", 0, 1, "", at(0)), "d0")
    return history


def merge(
    history: RunHistory, s: float, *names: str, incarnation: int = 1, tokens: int = 100, slot_s: float = 1.0
) -> None:
    inputs = tuple(In(name, incarnation, tokens, 7) for name in names)
    line = CommitLine("merge", history.n + 1, 1, "", at(s), inputs, (Out(history.n % 2),), alive=3, slot_s=slot_s)
    history.add(line, "d")


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
    assert len(history.bins) <= MAX_POINTS and history.width_s == 4.0
    assert sum(bin_.merges for bin_ in history.bins.values()) == 5000
    assert sum(bin_.by.get("rhine", 0) for bin_ in history.bins.values()) == 2500
    assert {bin_.fewest for bin_ in history.bins.values()} == {1}
    assert max(bin_.tokens for bin_ in history.bins.values()) == history.tokens
    assert len(csv_of(history).splitlines()) <= MAX_POINTS + 1


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
    assert history.outages == [] and all(bin_.merges for _, _, bin_ in stretches(history, 240)[1:])


def test_a_higher_incarnation_is_a_restart_and_a_higher_epoch_a_takeover() -> None:
    history = begun()
    merge(history, 1, "iowa")
    merge(history, 2, "iowa", incarnation=3)
    history.add(CommitLine("epoch_start", 3, 2, "", at(3)), "d3")
    assert (history.learners["iowa"].restarts, history.takeovers) == (1, 1)
    assert [(mark.kind, mark.unit, mark.s) for mark in history.marks] == [(RESTART, "iowa", 2.0)]


def test_a_new_process_after_a_stop_is_no_restart_and_the_next_one_is() -> None:
    history = begun()
    merge(history, 1, "iowa")
    history.add(CommitLine("stop", 2, 1, "", at(2)), "d2")
    for second, incarnation, restarts in ((3, 2, 0), (4, 2, 0), (5, 3, 1)):
        merge(history, second, "iowa", incarnation=incarnation)
        assert history.learners["iowa"].restarts == restarts


def test_a_rollback_takes_tokens_and_losses_back() -> None:
    history = begun()
    for second in range(1, 5):
        merge(history, second, "iowa")
        history.add(CommitLine("eval", history.n + 1, 1, "", at(second), loss=2.0, tokens=history.tokens), "d")
    tokens = [point.tokens for point in history.losses]
    half = tokens[1]
    history.add(CommitLine("rollback", history.n + 1, 1, "", at(6), shares=(("iowa", half * sum(PARAMETERS)),)), "d")
    assert history.tokens == half and [point.tokens for point in history.losses] == tokens[:2]
    merge(history, 7, "iowa")
    assert not any(rate < 0 for _, rate in rates(history))


def test_a_storm_of_restarts_pushes_no_rarer_event_out() -> None:
    history = begun()
    history.mark(Mark(0.5, "stop", "syncer", "stopped"))
    for number in range(3 * MAX_MARKS):
        history.mark(Mark(float(number), RESTART, "iowa", "is back"))
    assert len(history.marks) <= MAX_MARKS and history.marks[0].kind == "stop"
    assert history.marks_left_out + len(history.marks) == 3 * MAX_MARKS + 1


@pytest.mark.parametrize("time", ["", "yesterday", "9999-99-99", "0001-01-01T00:00:00+23:59"])
def test_times_that_are_none_break_nothing(time: str) -> None:
    assert parse_time(time) is None
    history = begun()
    history.add(CommitLine("skip", 1, 1, "", time), "d1")
    assert history.skips == 1 and history.span_s == 0.0


COMMITS = 150


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    resume.build(tmp_path / "log", COMMITS)
    return tmp_path / "log"


def read(log: Path, run: RunFormat | None = None, state: RunState | None = None) -> tuple[RunHistory, RunState, int]:
    """(the history, the log's state, the reads that the history took)."""
    run, meter = run or resume.make_run(), MeteredStore(LocalStore(log))
    state = state or perform(read_log(run), LocalStore(log), SystemClock(lambda: 0.0, lambda s: None, lambda: None))
    return read_history(meter, run, state), state, meter.counts.requests.get("get", 0)


def test_a_history_agrees_with_the_state(log: Path) -> None:
    history, state, reads = read(log)
    assert (history.token_parameters, history.merges) == (state.token_parameters, state.merges)
    assert (history.n, history.digest, reads) == (state.n, state.digest, COMMITS)


def test_a_second_report_reads_only_what_is_new(log: Path, tmp_path: Path) -> None:
    first, _, _ = read(log)
    again, _, reads = read(log)
    assert reads == 0 and again == first
    longer = tmp_path / "longer"
    resume.build(longer, COMMITS + 30)
    later, state, reads = read(longer)
    assert reads == 30 + 1, "the 30 new ones, and the last one known, to see that the log goes on from it"
    assert later.n == state.n and later.merges == state.merges


def test_a_kept_history_of_another_log_is_not_continued(log: Path, tmp_path: Path) -> None:
    read(log)
    other = tmp_path / "other"
    resume.build(other, COMMITS + 30, draft=lambda run, state: resume.next_commit(run, state, learners=3))
    history, state, reads = read(other)
    assert reads == COMMITS + 30 + 1 and history.token_parameters == state.token_parameters


@pytest.mark.parametrize("kept", [b"", b"{}", b'{"version":1}', b"[" * 100])
def test_a_spoilt_kept_file_costs_time_alone(log: Path, tmp_path: Path, kept: bytes) -> None:
    read(log)
    (path,) = (tmp_path / "home" / ".report").iterdir()
    path.write_bytes(kept)
    history, state, reads = read(log)
    assert reads == COMMITS and history.n == state.n


def test_a_changed_commit_is_found_by_the_chain(log: Path) -> None:
    _, state, _ = read(log)
    path = log / commit_key(7)
    path.write_bytes(path.read_bytes().replace(b'"tokens":1000', b'"tokens":9999'))
    (log.parent / "home" / ".report").rename(log.parent / "elsewhere")
    with pytest.raises(DataCheckError, match="chain"):
        read(log, state=state)


def test_commits_that_are_gone_are_counted_and_the_series_begin_later(log: Path) -> None:
    for number in range(40):
        (log / commit_key(number)).unlink()
    history, state, _ = read(log)
    assert (history.first, history.missing, history.n) == (40, 40, state.n)
    assert history.merges == state.merges - 39
    assert csv_of(history).splitlines()[-1].split(",")[1] == str(state.tokens(resume.make_run().layout))


def test_a_cache_that_cannot_be_written_fails_no_report(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (log.parent / "file").write_text("")
    monkeypatch.setenv("DILOCO_HOME", str(log.parent / "file"))
    assert read(log)[0].n == COMMITS - 1


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
