"""An island of several ranks beside one of a single process: ranks are lost, and every token still counts right."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest

from tests.end_to_end.conftest import ISLAND, SLOW, Playground
from tests.unit.learner.test_parent import free_port
from tests.waiting import wait_until

STUCK_WITHIN_S = 180.0


def islands(place: Playground, ranks: int) -> None:
    """Slowed down alike, or the plan leaves the slow one out."""
    place.islands("solo")
    inventory = place.directory / "quickstart" / "inventory.yaml"
    inventory.write_text(inventory.read_text() + ISLAND.format("team", f"{SLOW}, ranks: {ranks}"))


def ranks_of(place: Playground) -> list[psutil.Process]:
    """In the order of their ranks."""
    found = psutil.Process(place.pids()["team"]).children()
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


def incarnation(status: dict[str, Any]) -> int:
    return next(int(item["incarnation"] or 0) for item in status["learners"] if item["name"] == "team")


def trains_as(place: Playground, number: int) -> None:
    place.wait_for(
        lambda s: (
            incarnation(s) == number
            and any(item["name"] == "team" and item["state"] == "TRAINING" for item in s["learners"])
        )
    )


def begins(place: Playground, number: int) -> None:
    """Started by hand: here the unit counts as held down."""
    place.wait_for(lambda s: incarnation(s) == number)


def stopped_and_verified(place: Playground) -> None:
    assert place.run("stop", "quickstart").returncode == 0
    found = place.json("verify", "quickstart")
    assert found["ok"] and found["duplicates"] == 0 and found["missing"] == 0 and found["mismatches"] == []


@pytest.mark.long
def test_a_lost_rank_ends_the_incarnation_the_next_goes_on_and_two_nodes_are_one_island(playground: Playground) -> None:
    """At last with two parents, as two machines would have them, that meet at the address they are given."""
    islands(playground, ranks=2)
    playground.launch(tokens=10_000_000)
    trains_as(playground, 1)
    for number, rank in ((2, 1), (3, 0)):
        playground.wait_for(lambda s, taken=s_taken(playground): s_taken_of(s) > taken)
        before = ranks_of(playground)
        before[rank].kill()
        wait_until(lambda before=before: not any(is_alive(process) for process in before))
        trains_as(playground, number)
    assert "rank 1 of 2 was killed by SIGKILL" in playground.log("team")
    url = playground.json("status", "quickstart")["store"]["url"]
    assert playground.run("chaos", "kill", "team", "--hold").returncode == 0
    words = ("learner", "--run", url, "--name", "team", "--ranks", "1", "--nodes", "2", "--rendezvous")
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [playground.start(*words, endpoint, "--node-rank", str(index)) for index in (1, 0)]
    begins(playground, 4)
    playground.wait_for(lambda s, taken=s_taken(playground): s_taken_of(s) > taken)
    stopped_and_verified(playground)
    said = [node.communicate(timeout=60) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said


def s_taken(place: Playground) -> int:
    return s_taken_of(place.json("status", "quickstart"))


def s_taken_of(status: dict[str, Any]) -> int:
    """Merged tokens of the island."""
    return next(int(item["tokens"]) for item in status["learners"] if item["name"] == "team")


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.long
@pytest.mark.parametrize("paused", [[0], [0, 1]])
def test_a_paused_rank_is_stuck_and_the_island_begins_anew(playground: Playground, paused: list[int]) -> None:
    islands(playground, ranks=2)
    playground.launch(tokens=10_000_000)
    playground.wait_for(lambda s: s_taken_of(s) > 0)  # the first steps have more time, as they may compile
    ranks = ranks_of(playground)
    for rank in paused:
        ranks[rank].send_signal(signal.SIGSTOP)
    playground.wait_for(
        lambda s: any(item["name"] == "team" and item["state"] == "STUCK" for item in s["learners"]), STUCK_WITHIN_S
    )
    playground.wait_for(lambda s: incarnation(s) == 2, STUCK_WITHIN_S)
    trains_as(playground, 2)
    assert "STUCK: no step for" in playground.log("team")
    stopped_and_verified(playground)


@pytest.mark.long
@pytest.mark.parametrize(("planned", "counts"), [(4, (2, 4))], ids=["4-2-4"])
def test_an_island_goes_on_with_another_number_of_ranks(
    playground: Playground, planned: int, counts: tuple[int, ...]
) -> None:
    islands(playground, ranks=planned)
    playground.launch(tokens=10_000_000)
    trains_as(playground, 1)
    saves(playground, 1)
    url = playground.json("status", "quickstart")["store"]["url"]
    assert playground.run("chaos", "kill", "team", "--hold").returncode == 0
    for number, ranks in enumerate(counts, start=2):
        learner = playground.start("learner", "--run", url, "--name", "team", "--ranks", str(ranks))
        begins(playground, number)
        playground.wait_for(lambda s, taken=s_taken(playground): s_taken_of(s) > taken)
        saves(playground, number)
        learner.send_signal(signal.SIGTERM)
        said = "".join(learner.communicate(timeout=60))
        assert "inner moments restored" in said, said
        assert learner.returncode == 143
        resized = f"ranks {ranks}, planned were {planned}: batches of 256 tokens as planned"
        assert (resized in said) is (ranks != planned)
    stopped_and_verified(playground)


def saves(place: Playground, number: int) -> None:
    """An offer of this incarnation of the island tells of saved moments, which the next one will restore."""
    folder = place.directory / "quickstart" / "bucket"
    offers, told = f"**/offer/team/{number:08d}/*.json", f"inner/team/{number:08d}/"
    wait_until(lambda: any(told in offer.read_text() for offer in folder.glob(offers)), 120.0)
