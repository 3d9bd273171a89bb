"""A machine that the launch did not know joins a running run by one command, and leaves in order on SIGTERM."""

from __future__ import annotations

import signal

from tests.end_to_end.conftest import Playground
from tests.end_to_end.test_survival import learner


def test_an_island_joins_trains_and_leaves_and_the_run_verifies(playground: Playground) -> None:
    playground.islands("iowa", "ohio")
    playground.launch(10_000_000, "--set", "data.shards=3")
    url = playground.wait_for(lambda s: s["commit"] >= 4)["store"]["url"]
    words = ["learner", "--run", url, "--name"]
    spot = playground.start(*words, "spot", "--join", "--drain", "20s", "--batch-tokens", "512")
    playground.wait_for(lambda s: any(item["name"] == "spot" and item["tokens"] > 0 for item in s["learners"]))
    spot.send_signal(signal.SIGTERM)
    said, complaints = spot.communicate(timeout=40)
    assert spot.returncode == 143 and "asks to join" in said, complaints
    gone = learner(playground.json("status", "quickstart"), "spot")
    assert gone["state"] == "DONE" and gone["tokens"] > 0
    full = playground.run(*words, "second", "--join")
    assert full.returncode == 2 and "the data has 3 shards" in full.stderr, full.stderr
    unknown = playground.run(*words, "third")
    assert unknown.returncode == 2 and "has no island 'third'" in unknown.stderr and "--join" in unknown.stderr
    assert playground.run("stop", "quickstart").returncode == 0
    assert playground.json("verify", "quickstart")["ok"]
