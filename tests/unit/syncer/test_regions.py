"""What a syncer's process does for regions with a bucket of their own, without a syncer."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from diloco_cli.cli.supervision import stop_policy
from diloco_cli.clock import monotonic_s
from diloco_cli.config.codec import from_plain, to_plain
from diloco_cli.events.bucket import EventReader, EventWriter, write_batch
from diloco_cli.events.event import FreshEvent
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.observe import mirror_check
from diloco_cli.observe.mirror_check import check_mirror
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.heartbeats import MirrorHeartbeat
from diloco_cli.protocol.log.keys import commit_key, incarnation_key, offer_key
from diloco_cli.protocol.log.records import RegionStore, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.regions import Home, read_after_relays
from diloco_cli.runtime.supervisor import StopPolicy
from diloco_cli.runtime.units import UnitSpec
from diloco_cli.store import retry
from diloco_cli.store.memory import MemoryStore, shared_memory_store
from diloco_cli.store.open import open_store
from diloco_cli.store.port import BadKeyError, Created, Exists, Store, StoreForbiddenError, StoreUnavailableError
from diloco_cli.syncer import regions
from diloco_cli.syncer.regions import MAX_UNHEARD, RegionServices, ends_within_s, said_as_events
from diloco_cli.virtual.world import World
from tests.simulation.bucket_check import commits_of
from tests.simulation.regional import FAR, RegionalFleet, regional_run
from tests.waiting import wait_until


def ended_run() -> tuple[RunFormat, Store, MemoryStore, RunState]:
    """A run that is over, with both its buckets."""
    fleet = RegionalFleet(regional_run(merges=4))
    fleet.start()
    fleet.finish()
    world = World(store=fleet.world.store)
    reader = world.start("reader", read_log(fleet.run))
    assert world.run(lambda: reader.ended, 10.0)
    return fleet.run, fleet.world.store, fleet.far, reader.result


def services_at(name: str, run: RunFormat, home: Store, head: RunState) -> RegionServices:
    own = replace(run, regions=(RegionStore(FAR, f"memory://{name}", 0.1),))
    return RegionServices(own, home, Home(lambda: head, lambda: 0.1), [MirrorHeartbeat(FAR, offers=2, up_bytes=1000)])


@pytest.mark.parametrize(("parameters", "within_s"), [(1000, 30.0), (10**9, 190.0)])
def test_a_runs_end_waits_for_a_region_that_lacks_a_large_version(parameters: int, within_s: float) -> None:
    run = replace(regional_run(), layout=balanced_layout([ParameterFact("w", (parameters,), False)], 1))
    assert ends_within_s(run) == pytest.approx(within_s, abs=0.1)
    learner, syncer = UnitSpec("iowa", "learner", ()), UnitSpec("syncer", "syncer", ())
    here = [learner, syncer]
    assert stop_policy(run, here).finish_s == ends_within_s(run), "the supervisor gives its syncer as long"
    assert stop_policy(run, [learner]) == stop_policy(replace(run, regions=()), here) == StopPolicy()


def test_an_empty_region_is_filled_and_what_crossed_is_counted_on() -> None:
    run, home, _, head = ended_run()
    services = services_at("filled", run, home, head)
    services.start()
    services.end(over=True)
    there = open_store("memory://filled")
    assert there.list("commit/") == home.list("commit/")
    (heartbeat,) = services.heartbeats()
    assert (heartbeat.region, heartbeat.n, heartbeat.behind) == (FAR, head.n, 0)
    assert not heartbeat.stopped and not heartbeat.error
    sent = sum(len(there.get(key) or b"") for key in there.list(""))
    assert heartbeat.up_bytes >= 1000 + sent - len(there.get("hint/head.json") or b"") and heartbeat.offers == 2


def test_a_stopped_mirror_says_so_and_writes_nothing_more() -> None:
    run, home, _, head = ended_run()
    there = shared_memory_store("spoiled")
    there.create(commit_key(3), b"{}")
    services = services_at("spoiled", run, home, head)
    services.start()
    wait_until(lambda: services.services[0].stopped)
    services.end(over=False)
    (heartbeat,) = services.heartbeats()
    assert (heartbeat.stopped, heartbeat.n, heartbeat.behind) == (True, 2, head.n - 2)
    assert commit_key(3) in heartbeat.error
    assert there.list("commit/")[-1] == commit_key(3) and there.get(commit_key(3)) == b"{}"


def test_the_check_of_a_mirror_finds_other_bytes_and_forgives_being_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    run, home, far, head = ended_run()
    region = run.regions[0]
    found = check_mirror(run, region, home, far)
    assert found.ok and found.commits == head.n + 1 and found.behind == 0 and found.objects > 2 * found.commits
    late = MemoryStore()
    for key in far.list(""):
        if not key.startswith("commit/") or key < commit_key(5):
            late.put(key, far.get(key) or b"")
    found = check_mirror(run, region, home, late)
    assert found.ok and (found.commits, found.behind) == (5, head.n - 4)
    used = next(item for commit in commits_of(home) for item in commit.get("inputs", []) if item["learner"] == "l1")
    offer = offer_key("l1", used["incarnation"], used["seq"])
    for key in (commit_key(2), far.list("weights/")[0], offer, commit_key(head.n + 1), "FORMAT.json"):
        spoiled = MemoryStore()
        for other in far.list(""):
            spoiled.put(other, far.get(other) or b"")
        spoiled.put(key, b"{}")
        found = check_mirror(run, region, home, spoiled)
        assert [line.partition(":")[0] for line in found.mismatches] == [key] and not found.ok
    monkeypatch.setattr(mirror_check, "MOST_LISTED", 3)
    for other in far.list("weights/"):
        spoiled.put(other, b"{}")
    found = check_mirror(run, region, home, spoiled)
    assert (len(found.mismatches), found.unlisted) == (3, 1 + len(far.list("weights/")) - 3)


def test_only_what_a_regions_bucket_has_may_be_read_at_home() -> None:
    run, home, _, head = ended_run()
    services = services_at("withheld", run, home, structs.replace(head, phase="RUNNING"))
    syncer: Any = SimpleNamespace(run=run, state=head, inbox=Inbox(run))
    read_after_relays(syncer, services.links)
    withheld = syncer.inbox.withheld
    assert withheld("l1", 1, 0), "its bucket is empty"
    assert not withheld("l0", 1, 0), "a learner of the home bucket"
    assert not withheld("nobody", 1, 0), "whom the syncer refuses by itself"


class FailingRegionStore(MemoryStore):
    """Refuses everything while `error` is there."""

    error: Exception | None = None

    def get(self, key: str, max_bytes: int | None = None) -> bytes | None:
        if self.error is not None:
            raise self.error
        return super().get(key, max_bytes)

    def create(self, key: str, data: bytes) -> Created | Exists:
        if self.error is not None:
            raise self.error
        return super().create(key, data)


@pytest.mark.parametrize(
    "error",
    [StoreForbiddenError("403 says the region"), StoreUnavailableError("503 says the region"), BadKeyError("no such")],
    ids=["403", "503", "lasting"],
)
def test_a_region_that_fails_says_why_and_for_how_long_and_is_completed_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, home, _, head = ended_run()
    there = FailingRegionStore("failing")
    there.error = error
    monkeypatch.setattr(regions, "open_store", lambda url: there)
    monkeypatch.setattr(regions, "TRIES_AGAIN_S", 0.02)
    monkeypatch.setattr(regions, "PROVEN_S", 0.04)
    monkeypatch.setattr(retry, "pause_s", lambda attempt, error, jitter: 0.02)
    services = services_at("failing", run, home, structs.replace(head, phase="RUNNING"))
    services.start()
    wait_until(lambda: services.heartbeats()[0].error)
    (heartbeat,) = services.heartbeats()
    assert re.search(r"fails for \d+ s", heartbeat.error) and str(error) in heartbeat.error
    assert (heartbeat.n, heartbeat.behind, heartbeat.stopped) == (-1, head.n + 1, False)
    assert all(thread.is_alive() for thread in services.services[0].threads)
    there.error = None
    wait_until(lambda: services.heartbeats()[0].behind == 0 and not services.heartbeats()[0].error)
    services.end(over=True)
    assert there.list("commit/") == home.list("commit/")
    (heartbeat,) = services.heartbeats()
    assert heartbeat.requests > 2 * head.n and 0 < heartbeat.writes < heartbeat.requests


def test_a_heartbeat_names_some_of_those_who_are_not_heard_not_all() -> None:
    run, home, _, head = ended_run()
    services = services_at("crowd", run, home, head)
    (service,) = services.services
    service.link.relay.unheard |= {(f"l{i:04}", 1): "why " * 50 for i in range(1000)}
    assert sorted(services.heartbeats()[0].unheard) == [f"l{i:04}" for i in range(MAX_UNHEARD)]


def test_what_stops_one_learner_is_told_and_counted_for_it_alone() -> None:
    run, home, far, head = ended_run()
    there = shared_memory_store("impostor")
    for key in far.list(""):
        there.create(key, far.get(key) or b"")
    claim = incarnation_key("l1", head.learner("l1").floor)
    there.put(claim, b"somebody else's")
    told: list[str] = []
    own = replace(run, regions=(RegionStore(FAR, "memory://impostor", 0.1),))
    running = structs.replace(head, phase="RUNNING")
    services = RegionServices(own, home, Home(lambda: running, lambda: 0.1), tell=told.append)
    services.start()
    wait_until(lambda: services.heartbeats()[0].unheard and not services.heartbeats()[0].behind)
    services.end(over=False)
    (heartbeat,) = services.heartbeats()
    assert list(heartbeat.unheard) == ["l1"] and claim in heartbeat.unheard["l1"]
    assert not heartbeat.stopped and heartbeat.behind == 0
    assert from_plain(MirrorHeartbeat, to_plain(heartbeat)) == heartbeat
    assert any("region eu: l1 is not heard" in line and "start l1 again" in line for line in told)


def test_a_line_about_a_region_is_an_event_too_without_secrets() -> None:
    home = MemoryStore()
    events = EventWriter(home)
    said_as_events(events)("region eu: get of https://me:canary@host/x fails")
    events.close()
    (event,) = EventReader().read(home)
    assert (event.kind, event.unit) == (
        "region",
        "syncer",
    ) and event.text == "region eu: get of https://***@host/x fails"


def test_events_told_in_a_regions_bucket_come_home_also_the_last_ones() -> None:
    run, home, _, head = ended_run()
    there = shared_memory_store("tells")
    own = replace(run, regions=(RegionStore(FAR, "memory://tells", 0.1),))
    services = RegionServices(own, home, Home(lambda: head, lambda: 0.1), events_to=home)
    write_batch(there, "l1", [FreshEvent(monotonic_s(), "error", "its disk is full")])
    write_batch(there, "l0", [FreshEvent(monotonic_s(), "error", "not of this region")])
    services.start()
    wait_until(lambda: EventReader().read(home))
    write_batch(there, "l1", [FreshEvent(monotonic_s(), "gave_up", "it ended too often")])
    services.end(over=True)
    assert [(e.unit, e.text) for e in EventReader().read(home)] == [
        ("l1", "its disk is full"), ("l1", "it ended too often"),
    ]  # fmt: skip
    assert not any(thread.is_alive() for thread in services.services[0].threads)
