"""Two loops of a user's own in a gs:// bucket, whose loaders may fork: one is killed and started again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from diloco_cli.store.open import open_store
from tests.contract.fake_gcs import FakeGCS
from tests.end_to_end.conftest import Playground
from tests.end_to_end.own_loops import LoopScript, expected, merged_samples, own_loop
from tests.waiting import wait_until

URL = "gs://runs/here"
ISLANDS = ("iowa", "ohio")


@pytest.fixture
def bucket(playground: Playground, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playground]:
    with FakeGCS("runs") as server:
        playground.environment["STORAGE_EMULATOR_HOST"] = server.url
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield playground


def killed_and_finished(place: Playground, run: str, script: str, *more: str) -> list[LoopScript]:
    """Both islands of a run that is over: ohio was killed after its first offer, and started again."""
    scripts = [LoopScript(place, script, f"{URL}/{run}", name, more).start() for name in ISLANDS]
    ohio, store = scripts[1], open_store(f"{URL}/{run}")
    wait_until(lambda: store.list("offer/ohio/", limit=1) or ohio.process.poll() is not None, 240)
    ohio.kill()
    ohio.start()
    for each in scripts:
        each.ended_well(400)
    return scripts


def check(place: Playground, run: str, scripts: list[LoopScript], tokens: int) -> None:
    """What `verify` and `status` say is so, by a count of what the scripts printed."""
    found = place.json("verify", run)
    assert found["ok"] and found["tokens"] >= tokens
    assert found["own_loops"] == dict.fromkeys(ISLANDS, "addressed")
    seen = {learner["name"]: learner for learner in place.json("status", run)["learners"]}
    assert all(learner["note"].startswith("own loop, addressed data") for learner in seen.values())
    assert seen["ohio"]["incarnation"] == 2 and seen["ohio"]["state"] == "DONE"
    counts = merged_samples(open_store(f"{URL}/{run}"), scripts)
    assert all(counts.values()) and all(times == 1 for count in counts.values() for times in count.values())
    for shard, script in enumerate(scripts):
        for incarnation in range(1, len(script.outputs) + 1):
            batches = script.drawn(incarnation)
            (length,) = {later - one for one, later in itertools.pairwise(batches)}
            for position in list(batches)[:3]:
                assert batches[position] == expected(shard, 2, position, length, seed=0)
    first, second = scripts[1].drawn(1), scripts[1].drawn(2)
    assert second and 0 < min(second) <= max(first) + 512, "it goes on after what was offered"


def test_own_loops_that_fork_survive_a_kill_and_each_sample_is_merged_once(bucket: Playground) -> None:
    own_loop(bucket, URL, 50_000)
    check(bucket, "own-loop", killed_and_finished(bucket, "own-loop", "train.py"), 50_000)


@pytest.mark.long
def test_trainers_of_transformers_survive_a_kill_and_each_sample_is_merged_once(bucket: Playground) -> None:
    pytest.importorskip("accelerate", reason="transformers and accelerate are not installed")
    own_loop(bucket, URL, 40_000, "trainer.yaml")
    scripts = killed_and_finished(bucket, "own-trainer", "trainer.py", "../hugging-face/tiny-llama")
    check(bucket, "own-trainer", scripts, 40_000)


@pytest.mark.long
def test_modules_of_lightning_survive_a_kill_and_each_sample_is_merged_once(bucket: Playground) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    own_loop(bucket, URL, 80_000)
    check(bucket, "own-loop", killed_and_finished(bucket, "own-loop", "module.py"), 80_000)
