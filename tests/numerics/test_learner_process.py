"""A learner's process on its own: how it ends, and what it says about its moments when it comes back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_cli.config.settings import InnerSettings
from diloco_cli.protocol.actors.joining import fetch_moments
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat
from diloco_cli.protocol.log.keys import FORMAT_KEY, heartbeat_key
from diloco_cli.protocol.log.records import Offer, decode, encode
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from tests.forked import ForkedProcess, diloco
from tests.numerics.bucket import begun_run
from tests.numerics.harness import CLOCK
from tests.waiting import wait_until

Start = Callable[..., ForkedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the run's learner, or its syncer, on a machine that has not consented to the model's code."""
    children: list[ForkedProcess] = []

    def begin(what: str = "learner") -> ForkedProcess:
        words = [what, "--run", (tmp_path / "bucket").as_uri()] + ["--name", "l0"] * (what == "learner")
        if what == "learner":
            words += ["--allow-code", "tests.numerics.tiny", "--allow-code", "tests.numerics.loud"]
        child = ForkedProcess(diloco, *words, DILOCO_HOME=str(tmp_path / what))
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()


def stopped(child: ForkedProcess) -> str:
    """End it as a supervisor does; what it said on stdout."""
    child.send_signal(signal.SIGTERM)
    status = child.wait(40.0)
    said, complaints = child.said()
    assert status == 143, complaints
    return said


def test_a_loss_that_is_not_a_number_fails_the_run_and_not_the_program(tmp_path: Path, start: Start) -> None:
    _, store, _ = begun_run(tmp_path / "bucket", "tests.numerics.loud:not_a_number")
    child = start()
    status = child.wait(60.0)
    _, complaints = child.said()
    assert status == 12, complaints
    assert "the loss is nan at token 0 of shard 0" in complaints
    last = decode(LearnerHeartbeat, store.get(heartbeat_key("l0")) or b"", "heartbeat")
    assert last.state == "FAILED" and last.loss is None


def newest_offer(store: Store, incarnation: int) -> Offer | None:
    keys = store.list(f"offer/l0/{incarnation:08d}/", limit=100_000)
    return decode(Offer, store.get(keys[-1]) or b"", keys[-1]) if keys else None


def names_moments(store: Store) -> bool:
    """Whether the first incarnation has told where its moments are."""
    newest = newest_offer(store, 1)
    return newest is not None and newest.inner is not None


def test_a_learner_takes_the_micro_batches_that_the_runs_format_gives_its_island(tmp_path: Path, start: Start) -> None:
    """Batches are of four rows, and the model bears two at once: without micro-batches there is no first step."""
    run, store, _ = begun_run(tmp_path / "bucket", "tests.numerics.loud:small")
    islands = tuple(replace(island, micro_batch_tokens=2) for island in run.islands)
    store.put(FORMAT_KEY, encode(replace(run, islands=islands)))
    child = start()
    wait_until(lambda: store.list("offer/"))
    stopped(child)


def damage_moments(store: Store) -> None:
    for key in store.list("inner/"):
        data = store.get(key) or b""
        store.put(key, data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("model", "damage", "words"),
    [
        ("loud:half", lambda store: None, "inner moments restored"),
        ("tiny:regression", damage_moments, "inner moments lost, warming up anew"),
    ],
)
def test_a_second_incarnation_says_what_became_of_the_moments(
    tmp_path: Path, start: Start, model: str, damage: Callable[[Store], None], words: str
) -> None:
    inner = InnerSettings(lr=0.01, warmup_steps=0, save_every=1)
    _, store, _ = begun_run(tmp_path / "bucket", f"tests.numerics.{model}", inner)
    first = start()
    start("syncer")  # or nobody would ever make room for a second offer of a fragment
    wait_until(lambda: names_moments(store))
    assert "inner moments new" in stopped(first)
    damage(store)
    second = start()
    wait_until(lambda: newest_offer(store, 2))
    assert words in stopped(second)


@pytest.mark.parametrize("inner", [None, "inner/l0/1/2-blake3-nothing", "../outside", "", "offer"])
def test_moments_that_are_not_what_their_key_names_are_not_read(inner: str | None) -> None:
    store = MemoryStore()
    store.put("offer", b"something else")
    assert perform(fetch_moments(inner, 1000), store, CLOCK) is None
