"""A bucket per region: the home log alone decides, mirrors follow it, offers come home, whoever dies or is cut off."""

from __future__ import annotations

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RetentionSettings
from diloco_cli.digests import digest
from diloco_cli.protocol import regions
from diloco_cli.protocol.actors import collection, syncer
from diloco_cli.protocol.log import commit_log as log
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key, incarnation_key, offer_key
from diloco_cli.protocol.log.records import encode
from diloco_cli.store.port import Store
from tests.histories.replayer import Replayer
from tests.simulation.regional import RegionalFleet, regional_run

RUN = regional_run()


def ends_soundly(fleet: RegionalFleet, within_s: float = 90.0) -> None:
    """The home bucket replays from itself alone; the mirror holds the whole log, byte for byte, and nothing else in the
    log's name; and every offer of the far learner lies at home as it wrote it."""
    fleet.finish(within_s)
    assert fleet.errors() == [] and fleet.stops == []
    home, far = fleet.world.store, fleet.far
    known = {i: offer for i, offer in fleet.published.offers.items() if i[0] == "l0" or home.get(offer_key(*i))}
    assert Replayer(home, fleet.run).read().check_published(known).kinds[-1] == "finish"
    assert far.list("commit/") == home.list("commit/")
    for key in [FORMAT_KEY, *far.list("commit/")]:
        assert far.get(key) == home.get(key), key
    for key in [*far.list("weights/"), *far.list("snapshot/")]:
        assert home.get(key) in (far.get(key), None), "the same, or collected at home by now"
    assert all(digest(far.get(key) or b"") in key for key in far.list("weights/"))
    for commit in fleet.records()[-4:]:
        for output in commit.get("outputs", []):
            assert any(output["weights_digest"] in key for key in far.list("weights/"))
    assert far.list("state/") == [] and far.list("epoch/") == []
    floor = max((commit.get("floor", 0) for commit in fleet.records()), default=0)  # each bucket has collected its own
    later = (commit for commit in fleet.records() if commit["n"] > floor)
    settled = [item for commit in later for item in commit.get("inputs", []) if item["learner"] == "l1"]
    for item in settled:
        key = offer_key("l1", item["incarnation"], item["seq"])
        assert home.get(key) == far.get(key) is not None


def test_two_regions_train_one_run() -> None:
    fleet = RegionalFleet(RUN).start()
    ends_soundly(fleet)
    merges = [commit for commit in fleet.records() if "inputs" in commit]
    participants = [sorted(item["learner"] for item in merge["inputs"]) for merge in merges]
    assert participants.count(["l0", "l1"]) >= 4
    assert not any("l0" in key for key in fleet.far.list(""))


def test_a_region_that_is_cut_off_delays_nobody_and_catches_up() -> None:
    fleet = RegionalFleet(regional_run(merges=40, quorum=1)).start()
    fleet.world.run_for(2.0)
    before, mirrored = fleet.num_commits(), len(fleet.far.list("commit/"))
    assert before - mirrored <= 2
    fleet.cut_off_until_s = fleet.world.now_s + 3.0
    fleet.world.run_for(2.9)
    during = fleet.num_commits()
    assert during - before >= 20, "home goes on alone"
    assert len(fleet.far.list("commit/")) - mirrored <= 1
    assert fleet.mirror.behind >= 19
    fleet.world.run_for(0.5)
    assert fleet.mirror.behind <= 2, "and the mirror is complete soon after"
    ends_soundly(fleet)


def test_a_strangers_bytes_in_a_mirrors_slot_end_that_mirror_and_nothing_else() -> None:
    fleet = RegionalFleet(RUN)
    fleet.far.create(commit_key(7), encode({"n": 7}))
    fleet.start()
    fleet.world.run(lambda: bool(fleet.stops), 30.0)
    assert "other bytes" in str(fleet.stops[0]) and commit_key(7) in str(fleet.stops[0])
    assert fleet.world.run(lambda: fleet.served.state.phase == "FINISHED", 60.0), "the run goes on at home"
    assert fleet.far.list("commit/")[-1] == commit_key(7)
    assert fleet.num_commits() > 10
    assert fleet.relay.offers <= 8, "and nobody carries home what readers of such a log have made of it"


def test_offers_in_a_bucket_that_is_not_their_learners_do_not_count() -> None:
    """Somebody runs l1 against the home bucket: it looks like any other there, and nothing of it is merged."""
    fleet = RegionalFleet(RUN)
    fleet.far_actors = set()
    fleet.start()
    assert fleet.world.run(lambda: fleet.served.state.phase == "FINISHED", 60.0)
    home = fleet.world.store
    assert home.get(offer_key("l1", 1, 3)) is not None and fleet.far.get(incarnation_key("l1", 1)) is None
    assert not [i for commit in fleet.records() for i in commit.get("inputs", []) if i["learner"] == "l1"]


def newest_weights(store: Store, fleet: RegionalFleet, fragment: int) -> str:
    version = fleet.served.state.outputs[fragment].version
    (key,) = store.list(f"weights/{fragment:04d}/{version:012d}-")
    return key


def test_what_cannot_be_read_in_a_regions_bucket_any_more_is_made_anew_for_everybody() -> None:
    """The learners of the region begin anew when it is damaged: without it they make nothing, and the quorum is 2."""
    fleet = RegionalFleet(regional_run(merges=20, quorum=2)).start()
    fleet.until_commits(9)
    fleet.restart = False
    fleet.kill("l0", "l1")
    fleet.world.run_for(3.0)
    key = newest_weights(fleet.far, fleet, 1)
    whole = fleet.far.get(key) or b""
    fleet.far.put(key, b"other bytes")
    fleet.restart = True
    fleet.start_learners()
    assert fleet.world.run(lambda: bool(fleet.mirror.weights.damaged), 60.0)
    assert key in fleet.mirror.weights.damaged[1]
    assert fleet.world.run(lambda: fleet.served.state.phase == "FINISHED", 60.0)
    assert fleet.far.get(key) == b"other bytes", "nothing is overwritten"
    fleet.far.put(key, whole)
    ends_soundly(fleet)
    assert fleet.kinds().count("rollback") == 1


def test_a_version_that_home_lost_before_it_was_mirrored_is_passed_over_once_it_is_superseded() -> None:
    fleet = RegionalFleet(regional_run(merges=80, quorum=1)).start()
    fleet.until_commits(13)
    (apart,) = fleet.living("l0")
    fleet.world.pause(apart)  # it has no part in the lost version, and so can make its successor
    fleet.cut_off_until_s = fleet.world.now_s + 0.4
    n = fleet.served.state.n
    fleet.world.run(lambda: fleet.served.state.n > n + 1, 60)
    fleet.world.resume(apart)
    lost = max(fleet.served.state.outputs, key=lambda output: output.version)
    key = newest_weights(fleet.world.store, fleet, lost.fragment)
    whole = fleet.world.store.get(key) or b""
    fleet.world.store.put(key, b"other bytes")
    assert fleet.world.run(lambda: fleet.mirror.state.n > lost.version, 60)
    assert lost in fleet.served.state.history, "not before nobody can need it"
    assert fleet.far.get(key) is None
    fleet.world.store.put(key, whole)
    ends_soundly(fleet)


@pytest.mark.parametrize("cut_off_s", [0.0, 4.0])
def test_a_regions_bucket_forgets_what_home_forgets_and_a_late_mirror_passes_it_over(
    cut_off_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (log, syncer, regions):
        monkeypatch.setattr(module, "SNAPSHOT_EVERY", 4)
    monkeypatch.setattr(collection, "FLOORS_APART", 4)
    run = regional_run(merges=60)
    kept = replace(run.settings, retention=RetentionSettings(rounds=4, grace_s=0.5))
    fleet = RegionalFleet(replace(run, settings=kept)).start()
    fleet.world.run_for(1.5)
    fleet.cut_off_until_s = fleet.world.now_s + cut_off_s
    collector, home, far = fleet.mirror.collector, fleet.world.store, fleet.far
    assert fleet.world.run(
        lambda: collector.floor > 40 and collector.sweep is not None and collector.sweep.is_done, 60.0
    )
    assert fleet.served.state.phase == "RUNNING"
    assert len(far.list("weights/")) < fleet.num_commits() / 2
    assert all(int(key.split("/")[2][:12]) > collector.floor - 12 for key in far.list("weights/"))
    assert min(int(key.split("/")[1][:12]) for key in far.list("snapshot/")) > collector.floor - 12
    deltas = [int(key.split("/")[3][:10]) for key in far.list("delta/")]
    offers = [int(key.split("/")[3][:10]) for key in far.list("offer/")]
    assert min(deltas) > 10 and min(offers) > 10, "payloads with an outcome are gone, and so are their offers"
    ends_soundly(fleet)
    assert far.list("snapshot/")[-1] == home.list("snapshot/")[-1]
