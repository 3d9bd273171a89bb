"""`diloco learner` as two ranks of one island, through a bucket, with a syncer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.learner.parent import PARENT_VARIABLE, RankPlace
from diloco_cli.observe.replay import verified
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import ProcessClaim, decode, encode
from tests.forked import ForkedProcess, diloco
from tests.numerics.bucket import begun_run
from tests.numerics.harness import merges
from tests.waiting import wait_until

WITHIN_S = 300.0  # two ranks and a syncer on cores that other tests use


def forked_diloco(*words: str) -> None:
    """A rank ends with its parent, which is here the process that it is a fork of."""
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    diloco(*words)


class RankProcesses:
    """Of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[ForkedProcess]()

    def start(self, *words: str, **environment: str) -> ForkedProcess:
        common = ["--run", (self.folder / "bucket").as_uri(), "--allow-code", "tests.numerics.ranked"]
        environment = {"DILOCO_HOME": str(self.folder / "home"), **environment}
        child = ForkedProcess(forked_diloco, *words, *common, **environment)
        self.started.append(child)
        return child

    def start_ranks(self, ranks: int, meet: str) -> list[ForkedProcess]:
        url = f"file://{self.folder}/{meet}"
        places = [RankPlace(rank, ranks, rank, ranks, url) for rank in range(ranks)]
        return [
            self.start("learner", "--name", "l0", GLOO_SOCKET_IFNAME="lo", **place.environment()) for place in places
        ]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[RankProcesses]:
    found = RankProcesses(tmp_path)
    yield found
    for child in found.started:
        child.kill()
        child.wait()


def test_two_ranks_take_part_as_one_learner_and_every_merge_is_verified(processes: RankProcesses) -> None:
    run, store, _ = begun_run(processes.folder / "bucket", "tests.numerics.ranked:gpt")
    settings = replace(run.settings, data=replace(run.settings.data, entrypoint="tests.numerics.ranked:text"))
    islands = tuple(replace(i, batch_tokens=48, ranks=2, sharding="fsdp") for i in run.islands)
    run = replace(run, settings=settings, islands=islands)
    store.put(FORMAT_KEY, encode(run))
    processes.start("syncer")
    ranks = processes.start_ranks(2, "first")
    wait_until(lambda: len(merges(store)) >= 4 and store.list("inner/"), WITHIN_S)
    ranks[0].send_signal(signal.SIGTERM)
    assert [child.wait(60) for child in ranks] == [143, 143]  # the others end as rank 0 does
    before = len(merges(store))
    ranks = processes.start_ranks(2, "second")
    wait_until(lambda: len(merges(store)) >= before + 2, WITHIN_S)
    assert {item.incarnation for commit in merges(store)[before:] for item in commit.inputs} == {2}
    ranks[1].kill()
    assert ranks[0].wait(60) != 0
    found = verified(store, run)
    assert found.ok and found.merges >= before + 2
    claims = [decode(ProcessClaim, store.get(key) or b"", key) for key in store.list("incarnation/")]
    assert [claim.ranks for claim in claims] == [2, 2]
