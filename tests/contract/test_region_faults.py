"""A region whose bucket refuses or fails for a while, over http: its threads go on asking, say so, and catch up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from diloco_cli.protocol.log.heartbeats import MirrorHeartbeat
from diloco_cli.protocol.regions import Home
from diloco_cli.randomness import nonce
from diloco_cli.store import retry
from diloco_cli.store.open import open_store
from diloco_cli.syncer.regions import RegionServices
from tests.contract.fake_gcs import FakeGCS
from tests.contract.faults import Kind
from tests.unit.syncer.test_regions import ended_run
from tests.waiting import wait_until


@pytest.mark.parametrize("kind", ["403", "503", "lost_answer"])
def test_a_bucket_that_fails_for_a_while_is_completed_when_it_answers(
    kind: Kind, gs: FakeGCS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "pause_s", lambda attempt, error, jitter: 0.05)
    run, home, _, head = ended_run()
    url = f"gs://bucket/region/{nonce()}"
    gs.faults.set_rates({kind: 1.0})
    services = RegionServices(
        replace(run, regions=(replace(run.regions[0], url=url),)), home,
        Home(lambda: structs.replace(head, phase="RUNNING"), lambda: 0.1), tell=lambda line: None,
    )  # fmt: skip

    def heartbeat() -> MirrorHeartbeat:
        return services.heartbeats()[0]

    services.start()
    wait_until(lambda: "fails for" in heartbeat().error)
    assert heartbeat().behind == head.n + 1 and not heartbeat().stopped
    gs.heal()
    wait_until(lambda: heartbeat().behind == 0 and not heartbeat().error)
    services.end(over=True)
    assert open_store(url).list("commit/") == home.list("commit/")
