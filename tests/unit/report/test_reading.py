"""Reading a log for a report: once, chained to the verified end, and again only what is new."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.report.history import RunHistory
from diloco_cli.report.reading import read_history
from diloco_cli.report.table import csv_of
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.store.local import LocalStore
from diloco_cli.store.wrapper import MeteredStore
from tests.benchmarks import resume

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
