"""What is deleted in histories, and when: behind floors from which a replay can start, once readers had their time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from diloco_cli.histories.client import Bucket
from diloco_cli.histories.history import History
from diloco_cli.histories.monitor import Floors, Monitor
from diloco_cli.histories.options import GRACE_S, REGION, drawn_options, run_of
from diloco_cli.histories.processes import MAX_DRIFT
from diloco_cli.histories.replayer import ViolationError
from diloco_cli.protocol.log.operations import Create
from diloco_cli.protocol.log.snapshots import write_snapshot
from diloco_cli.protocol.log.state import RunState

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
    kinds = {f"home {kind}" for kind in ("delta", "weights", "state", "inner", "snapshot")}
    assert kinds | {f"{REGION} delta", f"{REGION} weights"} <= set(deleted)


def test_a_floor_counts_once_the_fastest_clock_has_seen_its_grace() -> None:
    floors = Floors(Bucket(), GRACE_S)
    floors.show({"kind": "merge", "floor": None}, 1.0)
    assert floors.past_grace(100.0) == 0
    floors.show({"kind": "gc_floor", "floor": 3}, 10.0)
    floors.show({"kind": "gc_floor", "floor": 6}, 10.5)
    for after_s, floor in ((0.0, 0), (SHORTEST_GRACE_S - 0.01, 0), (SHORTEST_GRACE_S + 0.01, 3), (2.0, 6)):
        assert floors.past_grace(10.0 + after_s) == floor, after_s


def test_nothing_is_deleted_within_the_grace_and_snapshots_only_below_the_floor() -> None:
    monitor = Monitor(Bucket(), run_of(drawn_options(0)))
    monitor.floors.show({"kind": "gc_floor", "floor": 6}, 10.0)
    with pytest.raises(ViolationError, match="before the grace of any floor was over"):
        monitor.deleted("syncer", "snapshot/000000000003.json", b"", 10.5)
    monitor.deleted("syncer", "snapshot/000000000003.json", b"", 11.0)
    with pytest.raises(ViolationError, match="which the floor 6 needs"):
        monitor.deleted("syncer", "snapshot/000000000006.json", b"", 11.0)


@pytest.mark.parametrize(
    ("snapshots", "says"),
    [((2, 6), "no snapshot's"), ((2, 4), "none in reserve"), ((), "no snapshot's"), ((4, 6), None)],
)
def test_a_floor_is_a_snapshots_number_with_a_newer_one_in_the_bucket(
    snapshots: tuple[int, ...], says: str | None
) -> None:
    options = drawn_options(3)
    history = History(3, options)
    for n in snapshots:
        steps = write_snapshot(history.run, RunState(n=n))
        first = next(steps)
        assert isinstance(first, Create)
        history.bucket.create(first.key, first.data)
    if says is None:
        history.monitor.check_floor(4)
    else:
        with pytest.raises(ViolationError, match=says):
            history.monitor.check_floor(4)
