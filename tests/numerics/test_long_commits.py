"""A real run whose commits are long, though its learners are two: heads and parts go through all that reads a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.settings import OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.narrowed import NarrowState
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.report.reading import read_history
from diloco_cli.runtime.driver import perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from tests.histories.memo import tuned
from tests.numerics.harness import CLOCK, commits, copy_of, make_run, merges, run_to_end
from tests.numerics.test_identities import CONSTANT

Bucket = tuple[RunFormat, Store]


@pytest.fixture(scope="module")
def finished() -> Bucket:
    sync = SyncSettings(every=4, fragments=2, overlap=0, adoption="at_tau", quorum=2)
    run = make_run(2, 3, sync, OuterSettings("nesterov", 0.7, 0.9), CONSTANT)
    with tuned(WHOLE_ENTRIES=1, PART_ENTRIES=1, HEAD_BYTES=1000):
        return run, run_to_end(run)[0]


@pytest.fixture
def store(finished: Bucket) -> MemoryStore:
    return copy_of(finished[1])


def parts(store: Store, n: int) -> list[bytes]:
    return (store.get(commit_key(n)) or b"").split(b"\n")


def test_the_learners_trained_to_the_end_and_all_merges_are_in_parts(finished: Bucket) -> None:
    made = merges(finished[1])
    assert len(made) >= 6 and all(len(merge.inputs) == 2 for merge in made)
    assert all(len(parts(finished[1], merge.n)) == 3 for merge in made)


def test_verify_computes_every_merge_anew_and_agrees(finished: Bucket, store: MemoryStore) -> None:
    found = LogVerifier(store, finished[0]).replay()
    assert found.ok and found.merges == len(merges(store)), found


@pytest.mark.parametrize("what", ["changed", "missing", "swapped", "of another commit"])
def test_verify_names_the_commit_of_which_a_part_is_not_the_one_that_was_written(
    finished: Bucket, store: MemoryStore, what: str
) -> None:
    n, other = (merge.n for merge in merges(store)[2:4])
    head, first, second = parts(store, n)
    damaged = {
        "changed": [head, first, second.replace(b'"scale":1', b'"scale":2')],
        "missing": [head, first],
        "swapped": [head, second, first],
        "of another commit": [head, first, parts(store, other)[2]],
    }[what]
    assert damaged != [head, first, second]
    store.put(commit_key(n), b"\n".join(damaged))
    found = LogVerifier(store, finished[0]).replay()
    assert not found.ok and any(commit_key(n) in text for text in found.mismatches), found


def test_a_report_counts_what_the_parts_say(
    finished: Bucket, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    state = perform(read_log(finished[0]), store, CLOCK)
    history = read_history(store, finished[0], state)
    assert not isinstance(state, NarrowState) and history.n == state.n == len(commits(store)) - 1
    assert (history.token_parameters, history.merges) == (state.token_parameters, state.merges)


def test_a_learner_of_the_run_reads_of_it_what_the_whole_log_says(finished: Bucket, store: MemoryStore) -> None:
    whole = perform(read_log(finished[0]), store, CLOCK)
    mine = perform(read_log(finished[0], RunState(), "l1"), store, CLOCK)
    assert (
        isinstance(mine, NarrowState) and mine.learners == {"l1": whole.learner("l1")} and mine.digest == whole.digest
    )
