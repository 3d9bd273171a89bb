"""Real processes in three regions, each with a bucket of its own: one region vanishes, the syncer dies meanwhile."""

from __future__ import annotations

import os
from typing import Any

from tests.end_to_end.conftest import SLOW, Playground
from tests.end_to_end.test_survival import commits

INVENTORY = f"""version: 1
store: {{url: bucket, region: us}}
regions:
  us: {{egress: 0.12/GB}}
  eu: {{store: bucket-eu, egress: 0.08/GB}}
  asia: {{store: bucket-asia}}
islands:
  - {{name: iowa, region: us, {SLOW}}}
  - {{name: belgium, region: eu, {SLOW}}}
  - {{name: tokyo, region: asia, {SLOW}}}
"""


def mirror(status: dict[str, Any], region: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in status["mirrors"] if item["region"] == region)
    return found


def in_last_10(status: dict[str, Any]) -> dict[str, int]:
    return {learner["name"]: learner["in_last_10"] for learner in status["learners"]}


def test_a_region_that_vanishes_delays_nobody_and_is_completed_by_another_syncer(playground: Playground) -> None:
    folder = playground.directory / "quickstart"
    (folder / "inventory.yaml").write_text(INVENTORY)
    playground.launch(100_000_000, "--set", "sync.every=48")
    playground.wait_for(lambda s: s["commit"] >= 3 and all(in_last_10(s).values()))
    there, away = folder / "bucket-eu" / "quickstart", folder / "bucket-eu" / "away"
    os.rename(there, away)
    playground.kill("syncer")
    before = len(commits(playground))
    status = playground.wait_for(lambda s: s["syncer"]["epoch"] == 2 and s["commit"] > before + 3)
    assert mirror(playground.wait_for(lambda s: mirror(s, "eu")["state"] == "BEHIND"), "eu")["last_error"]
    os.rename(away, there)
    status = playground.wait_for(lambda s: mirror(s, "eu")["state"] == "FOLLOWS" and in_last_10(s)["belgium"] > 0)
    assert mirror(status, "asia")["state"] == "FOLLOWS"
    eu = mirror(status, "eu")
    assert eu["egress_cost"] > 0 and eu["down_bytes"] > 5_000 and eu["requests"] > eu["writes"] > 10
    refused = playground.run("learner", "--run", (folder / "bucket").as_uri() + "/quickstart", "--name", "belgium")
    assert refused.returncode == 2 and "bucket-eu/quickstart" in refused.stderr
    assert playground.run("chaos", "kill", "belgium", "--run", there.as_uri()).returncode == 0
    playground.wait_for(lambda s: any(e["kind"] == "chaos" and e["unit"] == "belgium" for e in s["recent"]))
    assert list((there / "event" / "belgium").glob("*.jsonl")), "told there, and carried home"
    assert playground.run("stop", (folder / "bucket-eu").as_uri() + "/quickstart").returncode == 0
    playground.wait_for(lambda s: s["state"] == "STOPPED" and {m["state"] for m in s["mirrors"]} == {"FOLLOWS"})
    found = playground.json("verify", "quickstart", "--mirrors")
    assert found["ok"] and [(m["region"], m["behind"], m["ok"]) for m in found["mirrors"]] == [
        ("asia", 0, True), ("eu", 0, True),
    ]  # fmt: skip
    assert {p.name for p in (there / "commit").glob("[!.]*")} == set(commits(playground))
