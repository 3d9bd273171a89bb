"""The parent of an island's ranks, with real processes of toy ranks that form a real group.

A process's place among its island's ranks, from the variables of what started it.

Which ranks hang, by what they have counted and when.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from diloco_cli.clock import monotonic_s
from diloco_cli.errors import TryAgainError, UsageError
from diloco_cli.learner.parent import (
    END_S,
    FIRST_S,
    LEAST_S,
    STEP_TIMES,
    RankCount,
    RankPlace,
    Watchdog,
    culprit,
    interface_to,
    node_here,
    place_here,
    started_as_rank,
)
from tests.forked import ForkedProcess
from tests.unit.learner.toy_parent import run_forking
from tests.waiting import wait_until

MOST_S = 90.0


@contextmanager
def parent(
    doer: int = 0, deed: str = "done", at: int = 0, least_s: float = 60.0, nodes: int = 1, index: int = 0, port: int = 0
) -> Iterator[ForkedProcess]:
    process = ForkedProcess(run_forking, doer, deed, at, least_s, nodes, index, port)
    try:
        yield process
    finally:
        for one in [process, *children(process)]:
            one.kill()


def children(process: ForkedProcess) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def ended(process: ForkedProcess) -> tuple[int, str]:
    return process.wait(MOST_S), "".join(process.said())


def stepping(process: ForkedProcess) -> list[psutil.Process]:
    """Its ranks, once they listen for each other."""
    wait_until(lambda: len(children(process)) == 2 and all(listening(rank) for rank in children(process)))
    return sorted(children(process), key=lambda rank: rank.pid)


def listening(rank: psutil.Process) -> list[str]:
    return [c.laddr.ip for c in rank.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_exit_status_is_the_parents(rank: int) -> None:
    with parent(rank, "exit9", 5) as process:
        status, out = ended(process)
    assert status == 9, out
    assert f"rank {rank} of 2 ended with status 9" in out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_the_parent_dies_by_the_same_signal(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with parent(rank, "kill", 5) as process:
        status, out = ended(process)
    assert status == -signal.SIGKILL, out
    assert f"rank {rank} of 2 was killed by SIGKILL" in out
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize("rank", [0, 1])
def test_a_paused_rank_is_found(rank: int) -> None:
    with parent(rank, "stop", 30, least_s=2.0) as process:
        status, out = ended(process)
    assert status == 1, out
    assert "STUCK: no step for " in out


def test_on_one_node_nothing_listens_beyond_loopback() -> None:
    with parent(0, "long") as process:
        ranks = stepping(process)
        assert {address for rank in ranks for address in listening(rank)} <= {"127.0.0.1", "::1"}
        assert not listening(psutil.Process(process.pid))


def test_ranks_of_several_nodes_listen_on_the_interface_of_the_named_address() -> None:
    assert interface_to("127.0.0.1") == interface_to("localhost") == "lo"
    with pytest.raises(TryAgainError, match="no way to nowhere"):  # its name may come yet
        interface_to("nowhere.invalid")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((2, 2, 0, None), "none of them says where they meet"),
        ((2, 2, 2, "127.0.0.1:1"), "--node-rank 2"),
        ((2, 2, 1, "http://here"), "must be HOST:PORT"),
    ],
)
def test_nodes_that_do_not_fit_together_are_refused(words: tuple[int, int, int, str | None], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        node_here("file:///nowhere", "l0", *words)


def test_a_signal_lets_rank_0_leave_first() -> None:
    with parent(0, "long") as process:
        stepping(process)
        process.send_signal(signal.SIGTERM)
        status, out = ended(process)
    assert status == 143, out
    assert "rank 0 of 2 ended with status 143" in out


def test_ranks_die_with_their_parent_also_paused_ones() -> None:
    with parent(0, "long") as process:
        ranks = stepping(process)
        ranks[1].send_signal(signal.SIGSTOP)
        process.kill()
        process.wait()
        wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))


def test_nodes_meet_where_the_user_says_and_end_together() -> None:
    port = free_port()
    with (
        parent(1, "kill", 20, nodes=2, index=1, port=port) as second,
        parent(1, "kill", 20, nodes=2, port=port) as first,
    ):
        began_s = monotonic_s()
        assert ended(second)[0] == -signal.SIGKILL
        status, out = ended(first)
    assert status == 1, out  # its own rank lost the other
    assert monotonic_s() - began_s < MOST_S / 2 + END_S


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_who_ended_the_others() -> None:
    assert culprit({0: 0, 1: 0}, ()) is None
    assert culprit({0: 1, 1: 9}, ()) == 1  # rank 0 lost the other
    assert culprit({0: 12, 1: -9, 2: 1}, ()) == 1
    assert culprit({0: 12, 1: -9, 2: 1}, {1}) == 0
    assert culprit({0: 0, 1: -9}, {1}) is None
    assert culprit({0: 75, 1: 1}, ()) == 1  # rank 0 has only lost the other
    assert culprit({0: 75, 1: 1, 2: 2}, ()) == 2
    assert culprit({0: 75, 1: 75}, ()) == 0  # both have lost one of another node


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    ("values", "place"),
    [
        (("5", "8", "1", "4"), RankPlace(5, 8, 1, 4)),
        (("1", "2", None, None), RankPlace(1, 2, 0, 1, guessed=True)),  # as in a pod of its own
        (("0", "1", "0", "1"), None),  # the only one
    ],
)
def test_it_is_what_the_environment_says(
    values: tuple[str | None, ...], place: RankPlace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(NAMES, values, strict=True):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert place_here() == place and started_as_rank() == (place is not None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert started_as_rank(), "also as the only one, by torchrun"


def test_numbers_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("2", "2", "0", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="RANK=2, WORLD_SIZE=2"):
        place_here()


def seen(watchdog: Watchdog, counts: Sequence[RankCount], from_s: float, to_s: float) -> dict[int, float]:
    """Look every second with the same counts."""
    silent: dict[int, float] = {}
    for second in range(int(from_s), int(to_s) + 1):
        silent = watchdog.silent(counts, float(second))
    return silent


def watched(step_s: int, steps: int, ranks: int = 2) -> tuple[Watchdog, list[RankCount]]:
    """A watchdog that has seen so many steps of all ranks."""
    watchdog, counts = Watchdog(ranks, 0.0), [RankCount()] * ranks
    for second in range(step_s * steps + 1):
        counts = [RankCount(second // step_s, second // step_s)] * ranks
        assert watchdog.silent(counts, float(second)) == {}
    return watchdog, counts


def test_the_first_step_may_take_long() -> None:
    watchdog = Watchdog(2, 0.0)
    assert seen(watchdog, [RankCount(), RankCount()], 1, FIRST_S) == {}
    assert set(seen(watchdog, [RankCount(), RankCount()], FIRST_S + 1, FIRST_S + 1)) == {0, 1}


def test_silence_for_ten_step_times_is_a_hang() -> None:
    watchdog, counts = watched(step_s=7, steps=6)
    last_s = 7 * 6
    assert seen(watchdog, counts, last_s, last_s + 7 * STEP_TIMES) == {}
    assert seen(watchdog, counts, last_s + 7 * STEP_TIMES + 1, last_s + 7 * STEP_TIMES + 1) == {0: 71.0, 1: 71.0}


def test_fast_steps_have_a_least_patience() -> None:
    watchdog, counts = watched(step_s=1, steps=10)
    assert seen(watchdog, counts, 10, 10 + LEAST_S) == {}
    assert seen(watchdog, counts, 10 + LEAST_S + 1, 10 + LEAST_S + 1) != {}


def test_a_wait_is_a_sign_of_life() -> None:
    watchdog, _ = watched(step_s=1, steps=10)
    for second in range(10, 200):
        assert watchdog.silent([RankCount(second, 10), RankCount(second, 10)], float(second)) == {}


def test_its_own_pause_is_no_silence_of_the_ranks() -> None:
    watchdog, counts = watched(step_s=1, steps=10)
    assert watchdog.silent(counts, 10_000.0) == {}
    assert seen(watchdog, counts, 10_001, 10_000 + LEAST_S) == {}
