"""Two loops of a user's own in a gs:// bucket, whose loaders fork: one is killed and started again."""

from __future__ import annotations

import itertools

import pytest

from diloco_cli.store.open import open_store
from tests.contract.fake_gcs import FakeGCS
from tests.end_to_end.conftest import Playground
from tests.end_to_end.own_loops import LoopScript, expected, merged_samples, own_loop
from tests.waiting import wait_until

URL = "gs://runs/here"


def test_own_loops_that_fork_survive_a_kill_and_each_sample_is_merged_once(
    playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGCS("runs") as server:
        playground.environment["STORAGE_EMULATOR_HOST"] = server.url
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        own_loop(playground, URL, 80_000, "--set", "sync.quorum=2")
        iowa, ohio = (LoopScript(playground, "train.py", f"{URL}/own-loop", name).start() for name in ("iowa", "ohio"))
        wait_until(lambda: len(ohio.drawn(1)) > 30 or ohio.process.poll() is not None, 120)
        ohio.kill()
        ohio.start()
        for script in (iowa, ohio):
            script.ended_well(180)
        found = playground.json("verify", "own-loop")
        assert found["ok"] and found["tokens"] >= 80_000
        assert found["own_loops"] == {"iowa": "addressed", "ohio": "addressed"}
        seen = {learner["name"]: learner for learner in playground.json("status", "own-loop")["learners"]}
        assert all(learner["note"].startswith("own loop, addressed data") for learner in seen.values())
        assert seen["ohio"]["incarnation"] == 2 and seen["ohio"]["state"] == "DONE"
        counts = merged_samples(open_store(f"{URL}/own-loop"), [iowa, ohio])
    assert all(counts.values()) and all(times == 1 for count in counts.values() for times in count.values())
    for shard, script in enumerate((iowa, ohio)):
        for incarnation in range(1, len(script.outputs) + 1):
            batches = script.drawn(incarnation)
            assert all(later - one == 512 for one, later in itertools.pairwise(batches))
            for position in list(batches)[:3]:
                assert batches[position] == expected(shard, 2, position, 512, seed=0)
    first, second = ohio.drawn(1), ohio.drawn(2)
    assert second and 0 < min(second) <= max(first) + 512, "it goes on after what was offered"
