"""What is deleted in histories, and when: behind floors from which a replay can start, once readers had their time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from diloco_cli.protocol.actors.collection import LEAST_ROUNDS
from diloco_cli.protocol.log.keys import offer_key, snapshot_key
from tests.histories.client import Bucket
from tests.histories.history import History
from tests.histories.monitor import Floors, Monitor
from tests.histories.options import GRACE_S, REGION, drawn_options, run_of
from tests.histories.processes import MAX_DRIFT
from tests.histories.replayer import ViolationError

SEEDS = range(12)
SHORTEST_GRACE_S = GRACE_S / (1 + MAX_DRIFT)


def test_histories_delete_of_every_kind_at_home_and_in_a_region() -> None:
    """Else nothing of what is demanded of deletions would be looked at."""
    deleted: Counter[str] = Counter()
    for seed in SEEDS:
        options = replace(
            drawn_options(seed), learners=2, quorum=1, apart=1, kept_rounds=1, snapshot_every=3, fragments=1, merges=16,
            step_s=0.5, steps_a_slot=1, saves_every_rounds=1, list_lag_s=0.5, poisoner=None,  # its payloads must stay
        )  # fmt: skip
        history = History(seed, options)
        assert history.live().violation is None, seed
        assert history.region is not None
        for bucket, name in ((history.bucket, "home"), (history.region.bucket, REGION)):
            deleted.update(f"{name} {key.partition('/')[0]}" for key in bucket.listed_until_s)
    print(dict(deleted))
    kinds = {f"home {kind}" for kind in ("delta", "offer", "weights", "state", "inner", "snapshot")}
    assert kinds | {f"{REGION} delta", f"{REGION} offer", f"{REGION} weights"} <= set(deleted)


def test_a_floor_counts_once_the_fastest_clock_has_seen_its_grace() -> None:
    floors = Floors(Bucket(), GRACE_S)
    floors.show({"kind": "merge", "floor": None}, 1.0)
    assert floors.past_grace(100.0) == 0
    floors.show({"kind": "gc_floor", "floor": 3}, 10.0)
    floors.show({"kind": "gc_floor", "floor": 6}, 10.5)
    for after_s, floor in ((0.0, 0), (SHORTEST_GRACE_S - 0.01, 0), (SHORTEST_GRACE_S + 0.01, 3), (2.0, 6)):
        assert floors.past_grace(10.0 + after_s) == floor, after_s


def test_nothing_is_deleted_within_the_grace_and_two_snapshots_up_to_the_floor_stay() -> None:
    monitor = Monitor(Bucket(), run_of(drawn_options(0)))
    for n in (1, 3, 5, 8):
        monitor.bucket.objects[snapshot_key(n)] = b""
    monitor.floors.show({"kind": "gc_floor", "floor": 6}, 10.0)
    with pytest.raises(ViolationError, match="before the grace of any floor was over"):
        monitor.deleted("syncer", snapshot_key(1), b"", 10.5)
    monitor.deleted("syncer", snapshot_key(1), b"", 11.0)
    for n, left in ((3, r"\[5\]"), (5, r"\[\]"), (8, r"\[\]")):
        with pytest.raises(ViolationError, match=f"{left} alone lead to the floor 6"):
            monitor.deleted("syncer", snapshot_key(n), b"", 11.0)


def test_a_floor_leaves_two_rounds_of_commits() -> None:
    run = run_of(drawn_options(3))
    monitor, kept = Monitor(Bucket(), run), LEAST_ROUNDS * run.num_fragments
    monitor.check_floor(4, n=5 + kept)
    with pytest.raises(ViolationError, match="leaves fewer than"):
        monitor.check_floor(5, n=5 + kept)


def test_an_offer_is_deleted_once_the_next_one_has_its_outcome_too() -> None:
    monitor = Monitor(Bucket(), run_of(drawn_options(0)))
    monitor.floors.show({"kind": "gc_floor", "floor": 6}, 10.0)
    monitor.replayer.settled_at |= {("l0", 0, 7): 3, ("l0", 0, 8): 6, ("l0", 0, 9): 7}
    monitor.deleted("syncer", offer_key("l0", 0, 7), b"", 12.0)
    for seq in (8, 9, 10):
        with pytest.raises(ViolationError, match="which a reader behind the floor 6 may ask for"):
            monitor.deleted("syncer", offer_key("l0", 0, seq), b"", 12.0)
