"""A sample of the resume benchmark: reads are counted, not timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.protocol.log.commit_log import AHEAD, LONG_WAY, SNAPSHOT_EVERY
from diloco_cli.protocol.log.state import RunState
from tests.benchmarks import resume

COMMITS = 3_000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log")
    resume.build(directory, COMMITS)
    return directory


def opened(directory: Path) -> tuple[int, int, RunState]:
    requests, state = resume.opened(directory, resume.make_run())
    return requests["get"], requests["list"], state


def is_about(gets: int, needed: int) -> bool:
    """The last portion of commits may go past the log's end."""
    return needed <= gets < needed + AHEAD


def test_a_long_log_opens_with_few_reads_whatever_happened_to_hint_and_snapshot(log: Path) -> None:
    """By hand: commit 2,999 lies 55 behind snapshot 2,944, and 119 behind 2,880. With a hint: the hint, snapshot and
    its commit, 55 commits, and the one that is not there. With its snapshot damaged: both of it, the walk from commit 0
    for `LONG_WAY` commits, the listing, snapshot 2,944 again, then 2,880 and its 119 commits."""
    gets, lists, healthy = opened(log)
    assert is_about(gets, 1 + 2 + 55 + 1) and (lists, healthy.n) == (0, COMMITS - 1)
    damaged = sorted((log / "snapshot").iterdir())[-1]
    whole = damaged.read_bytes()
    resume.damage_newest(log)
    gets, lists, state = opened(log)
    assert is_about(gets, 1 + 2 + LONG_WAY + 2 + 2 + 119 + 1) and lists == 2 and state == healthy
    resume.lose_hint(log)
    gets, lists, state = opened(log)
    assert is_about(gets, 1 + LONG_WAY + 2 + 2 + 119 + 1) and lists == 2 and state == healthy
    damaged.write_bytes(whole)
    resume.age_hint(log)
    gets, lists, state = opened(log)
    assert is_about(gets, 1 + 2 + LONG_WAY + 2 + 55 + 1) and lists == 2 and state == healthy


def test_a_snapshot_of_another_log_is_not_believed(log: Path) -> None:
    """The newest three are replaced by an older one's bytes: the walk goes on from where it was."""
    snapshots = sorted((log / "snapshot").iterdir())
    kept = [path.read_bytes() for path in snapshots[-3:]]
    for path in snapshots[-3:]:
        path.write_bytes(snapshots[0].read_bytes())
    (log / "hint" / "head.json").unlink(missing_ok=True)
    gets, _, state = opened(log)
    for path, data in zip(snapshots[-3:], kept, strict=True):
        path.write_bytes(data)
    assert state.n == COMMITS - 1 and is_about(gets, 1 + COMMITS + 1 + 3 * 2)
    assert SNAPSHOT_EVERY < LONG_WAY
