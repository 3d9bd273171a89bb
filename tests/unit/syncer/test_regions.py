"""What a syncer's process does for regions with a bucket of their own, without a syncer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.protocol.beats import MirrorBeat
from diloco_cli.protocol.keys import commit_key, offer_key
from diloco_cli.protocol.log import read_log
from diloco_cli.protocol.records import RegionStore, RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.simulate.world import World
from diloco_cli.store.memory import MemoryStore, shared_memory_store
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.syncer.mirror_check import check_mirror
from diloco_cli.syncer.regions import RegionServices, region_services
from tests.simulation.bucket_check import commits_of
from tests.simulation.regional import FAR, RegionalFleet, regional_run


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
    return region_services(own, home, lambda: head, [MirrorBeat(FAR, offers=2, up_bytes=1000)])


def wait_for(holds: Callable[[], object]) -> None:
    deadline_s = monotonic_s() + 10
    while not holds():
        assert monotonic_s() < deadline_s
        sleep_s(0.01)


def test_an_empty_region_is_filled_and_what_crossed_is_counted_on() -> None:
    run, home, _, head = ended_run()
    services = services_at("filled", run, home, head)
    services.start()
    services.end(over=True)
    there = open_store("memory://filled")
    assert there.list("commit/") == home.list("commit/")
    (beat,) = services.beats()
    assert (beat.region, beat.n, beat.behind, beat.stopped, beat.error) == (FAR, head.n, 0, False, "")
    sent = sum(len(there.get(key) or b"") for key in there.list(""))
    assert beat.up_bytes >= 1000 + sent - len(there.get("hint/head.json") or b"") and beat.offers == 2


def test_a_stopped_mirror_says_so_and_writes_nothing_more() -> None:
    run, home, _, head = ended_run()
    there = shared_memory_store("spoiled")
    there.create(commit_key(3), b"{}")
    services = services_at("spoiled", run, home, head)
    services.start()
    wait_for(lambda: services.services[0].stopped)
    services.end(over=False)
    (beat,) = services.beats()
    assert beat.stopped and beat.n == 2 and beat.behind == head.n - 2 and commit_key(3) in beat.error
    assert there.list("commit/")[-1] == commit_key(3) and there.get(commit_key(3)) == b"{}"


def test_the_check_of_a_mirror_finds_other_bytes_and_forgives_being_behind() -> None:
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
    used = next(item for commit in commits_of(home) for item in commit["inputs"] if item["learner"] == "l1")
    offer = offer_key("l1", used["incarnation"], used["seq"])
    for key in (commit_key(2), far.list("cast/")[0], offer, commit_key(head.n + 1), "FORMAT.json"):
        spoiled = MemoryStore()
        for other in far.list(""):
            spoiled.put(other, far.get(other) or b"")
        spoiled.put(key, b"{}")
        found = check_mirror(run, region, home, spoiled)
        assert [line.partition(":")[0] for line in found.mismatches] == [key] and not found.ok


def test_only_what_a_regions_bucket_has_may_be_read_at_home() -> None:
    run, home, _, head = ended_run()
    services = services_at("withheld", run, home, replace(head, phase="RUNNING"))
    withheld = services.withheld_by(run, lambda: head)
    assert withheld("l1", 1, 0), "its bucket is empty"
    assert not withheld("l0", 1, 0), "a learner of the home bucket"
    assert not withheld("nobody", 1, 0), "whom the syncer refuses by itself"
