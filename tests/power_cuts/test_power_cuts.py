"""A power cut at any moment: what anybody was told of is there, and the run goes on.

A sample; the full count is python -m tests.power_cuts.study --states 5000, its result in README.md beside this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from diloco_cli.store.open import open_store
from tests.power_cuts.disk import Disk, Op
from tests.power_cuts.recorder import RecordingOs, recorded
from tests.power_cuts.study import MEMORY, Findings, cuts, examine, spread, study
from tests.power_cuts.workload import Work, bare_calls, record, run_to_the_end


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that can be: nothing here has to last."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


def first_violation(folder: Path, work: Work, without: str, every: int) -> str | None:
    history = record(folder / "recorded", work, without=without)
    return next(examine(history, work, cuts(history, 16, every), folder, Findings()), None)


def test_every_cut_of_bare_calls_keeps_what_was_told(folder: Path) -> None:
    history, findings = record(folder / "recorded", bare_calls), Findings()
    assert list(examine(history, bare_calls, cuts(history), folder, findings)) == []
    assert len(findings.states) > 50


@pytest.mark.parametrize("dies_at", [(), (86, 60)], ids=["undisturbed", "all killed twice before"])
def test_cuts_of_a_run_recover_to_the_last_acknowledged_commit(folder: Path, dies_at: tuple[int, ...]) -> None:
    history, findings = record(folder / "recorded", run_to_the_end, dies_at=dies_at), Findings()
    chosen = spread(list(cuts(history, 4, every=5)), 12)
    assert list(examine(history, run_to_the_end, chosen, folder, findings)) == []
    assert findings.gone_on == findings.cuts == 12


@pytest.mark.parametrize("forgotten", ["_temporary", "create", "put", "delete", "_make_durable_directory"])
def test_a_store_that_leaves_out_one_fsync_is_found_out(folder: Path, forgotten: str) -> None:
    assert (first_violation(folder, bare_calls, forgotten, every=1) or "").find("told:") > 0


def test_a_store_that_shows_what_may_still_be_lost_is_found_out(folder: Path) -> None:
    """Its writer died between the link and the fsync of the directory; somebody read the object before the cut."""
    after_a_link = 14  # five directories and their fsyncs, the temporary file, its bytes and fsync, and the link
    findings = Findings()
    sound = record(folder / "sound", bare_calls, dies_at=(after_a_link,))
    assert sound.ops[after_a_link - 1].asker == "create"
    assert list(examine(sound, bare_calls, cuts(sound, 8), folder, findings)) == []
    hasty = record(folder / "hasty", bare_calls, without="_read", dies_at=(after_a_link,))
    assert any(examine(hasty, bare_calls, cuts(hasty, 8), folder, findings))


@pytest.mark.long
@pytest.mark.parametrize("forgotten", ["_temporary", "create", "_make_durable_directory"])
def test_a_run_on_a_store_that_leaves_out_one_fsync_breaks(folder: Path, forgotten: str) -> None:
    assert first_violation(folder, run_to_the_end, forgotten, every=7)


def test_the_model_of_the_disk_by_hand() -> None:
    """A file of four bytes that got its name before either was fsynced: the name may be there or not, and behind it
    may lie nothing, a half, zeros, the other half, or all. Two fsyncs leave one state."""
    disk = Disk()
    for op in (Op("entry", 0, "name", 1), Op("write", 1, data=b"abcd")):
        disk.play(op)
    names = [{}, *({"name": data} for data in (b"", b"ab", bytes(4), b"\0\0cd", b"abcd"))]
    assert as_set(disk) == {frozenset(tree.items()) for tree in names}
    disk.play(Op("sync", 1))
    assert as_set(disk) == {frozenset(), frozenset({("name", b"abcd")})}
    disk.play(Op("sync", 0))
    assert as_set(disk) == {frozenset({("name", b"abcd")})}


def test_too_many_states_begin_with_the_extremes_and_their_neighbours() -> None:
    disk = Disk()
    for number in range(10):
        disk.play(Op("entry", 0, str(number), 1 + number))
    trees = [set(tree) for tree in disk.states(30, Random(1))]
    everything = {str(number) for number in range(10)}
    assert trees[:2] == [set(), everything]
    assert all(len(tree) <= 1 for tree in trees[2::3]) and all(len(tree) >= 9 for tree in trees[3::3])
    assert len(trees) == 30 and len(set(map(frozenset, trees))) > 15


def as_set(disk: Disk) -> set[frozenset[tuple[str, bytes | None]]]:
    return {frozenset(tree.items()) for tree in disk.states(100, Random(1))}


def test_the_recorder_sees_what_the_disk_sees(tmp_path: Path) -> None:
    """After the last op, if all of it comes to the disk, the directory is as it lies there."""
    history = record(tmp_path / "base", bare_calls)
    disk = Disk(history.directories)
    for op in history.ops:
        disk.play(op)
    state = list(disk.states(1000, Random(1)))[-1]
    there = {
        str(path.relative_to(tmp_path / "base")): None if path.is_dir() else path.read_bytes()
        for path in (tmp_path / "base").rglob("*")
    }
    assert state == there


def test_a_new_store_is_durable_with_its_parents(tmp_path: Path) -> None:
    """Each directory on the way to a store is fsynced after its child was made in it, the outermost first."""
    with recorded(RecordingOs(tmp_path)) as recorder:
        open_store((tmp_path / "a" / "b").as_uri(), create=True)
    assert [(op.kind, op.node, op.name) for op in recorder.ops] == [
        ("entry", 0, "a"), ("sync", 0, ""), ("entry", 1, "b"), ("sync", 1, ""),
    ]  # fmt: skip


@pytest.mark.long
def test_five_thousand_states(folder: Path) -> None:
    findings = study(folder, 5000)
    assert findings.violations == []
    assert len(findings.states) >= 1000
