"""What `plan` says of a bucket's objects and requests, against a run in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco_cli.config.settings import Link, RetentionSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.forecast.fleet import SimulatedFleet
from diloco_cli.forecast.stand_ins import Sizes
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.plan.flow import DAY_S, objects_kept, requests_per_day, retained_commits
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import Island, RunFormat, encode
from diloco_cli.signing import OPERATOR
from diloco_cli.store.memory import MemoryStore

LEARNERS, FRAGMENTS, SLOT_S, STEPS_A_SLOT = 4, 4, 2.0, 2
TOLERANCE = 0.15
LOG = ("commit/", "FORMAT", "epoch/", "incarnation/", "heartbeat/", "hint/", "snapshot/")


class CountingDeletes(MemoryStore):
    """Stores charge nothing for deletions."""

    deletes = 0

    def delete(self, key: str) -> None:
        self.deletes += 1
        super().delete(key)


def make_run() -> RunFormat:
    step_s, every = SLOT_S / STEPS_A_SLOT, STEPS_A_SLOT * FRAGMENTS
    settings = RunSettings(
        name="planned",
        train=TrainSettings(tokens=1 << 60, batch_tokens=1000),
        sync=SyncSettings(every=every, fragments=FRAGMENTS),
        retention=RetentionSettings(rounds=10, grace_s=20.0),
    )
    link = Link(up_bps=1e9, down_bps=1e9)
    islands = tuple(Island(f"l{i}", "here", 1000, every, 1000 / step_s, step_s, link=link) for i in range(LEARNERS))
    layout = balanced_layout([ParameterFact(f"w{i}", (100,), False) for i in range(FRAGMENTS)], FRAGMENTS)
    return RunFormat("planned", settings.name, "", settings, islands, layout, "test")


def test_objects_and_requests_are_those_of_a_run_in_virtual_time() -> None:
    run = make_run()
    fleet = SimulatedFleet(run, Sizes((1e6,) * FRAGMENTS, (1e6,) * FRAGMENTS, 0.0), {}, latency_s=0.01)
    fleet.world.store = store = CountingDeletes()
    store.create(FORMAT_KEY, run.keyring.sign(OPERATOR, FORMAT_KEY, encode(run)))
    fleet.start()
    world, most = fleet.world, 0
    assert world.run(lambda: fleet.state.merges >= 100, 1000.0)
    since_s, before = world.now_s, sum(actor.operations for actor in world.actors) - store.deletes
    for merges in range(102, 200, 2):
        assert world.run(lambda: fleet.state.merges >= merges, 100.0)  # noqa: B023
        most = max(most, sum(not key.startswith(LOG) for key in world.store.list("", limit=1 << 20)))
    made = sum(actor.operations for actor in world.actors) - store.deletes - before
    retained = retained_commits(SLOT_S, FRAGMENTS, run.settings)
    planned = objects_kept(retained, LEARNERS, FRAGMENTS, run.settings.sync.staleness_rounds)
    schedule = SimpleNamespace(fragments=FRAGMENTS)
    island = SimpleNamespace(syncer=SimpleNamespace(reads_back=not world.checks_uploads))
    fleet_of_plan = SimpleNamespace(kept=[island] * LEARNERS, schedule=schedule, served_slot_s=SLOT_S)
    requests = sum(requests_per_day(cast(Any, fleet_of_plan), run.settings))
    measured = made / (world.now_s - since_s) * DAY_S
    print(f"objects: at most {most}, planned {planned:.0f}; requests a day: {measured:.0f}, planned {requests:.0f}")
    assert most == pytest.approx(planned, rel=TOLERANCE)
    assert measured == pytest.approx(requests, rel=TOLERANCE)
