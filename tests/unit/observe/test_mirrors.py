"""How far each region's bucket is, in `status` and at the end of `launch`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from diloco_cli.observe.facts import Heard, RunFacts
from diloco_cli.observe.screen import status_text
from diloco_cli.observe.status import MirrorStatus, status_of
from diloco_cli.observe.summary import summary_of, summary_text
from diloco_cli.observe.unit_states import LOST_S
from diloco_cli.protocol.log.heartbeats import MirrorHeartbeat
from diloco_cli.protocol.log.records import RegionStore
from tests.unit.observe.test_status import RUN, STATE, SYNCER, facts

EU = MirrorHeartbeat("eu", n=9, offers=4, up_bytes=2_000_000_000, down_bytes=3_000_000_000, requests=1200, writes=300)


def with_region(heartbeat: MirrorHeartbeat | None, syncer_age_s: float = 1.0, phase: str = "RUNNING") -> RunFacts:
    run = replace(RUN, regions=(RegionStore("eu", "s3://far/nano", 0.1),), home_egress_per_gb=0.5)
    said = replace(SYNCER, mirrors=() if heartbeat is None else (heartbeat,))
    state = structs.replace(STATE, phase=phase)  # type: ignore[arg-type]
    return replace(facts(), run=run, state=state, syncer=Heard(said, syncer_age_s))


def mirror_of(known: RunFacts) -> MirrorStatus:
    return status_of(known).mirrors[0]


@pytest.mark.parametrize(
    ("heartbeat", "age_s", "phase", "state", "behind"),
    [
        (EU, 1.0, "RUNNING", "FOLLOWS", 0),
        (replace(EU, n=7), 1.0, "RUNNING", "FOLLOWS", 0),  # the heartbeat is older than the newest commits
        (replace(EU, n=8, behind=1, behind_s=0.2), 1.0, "RUNNING", "FOLLOWS", 1),
        (replace(EU, n=5, behind=4, behind_s=20.0), 1.0, "RUNNING", "BEHIND", 4),
        (replace(EU, n=5, behind=4, error="put fails"), 1.0, "RUNNING", "BEHIND", 4),
        (replace(EU, n=5), 1.0, "STOPPED", "BEHIND", 4),
        (replace(EU, n=5, behind=4, stopped=True, error="other bytes"), 1.0, "RUNNING", "STOPPED", 4),
        (EU, LOST_S + 1, "RUNNING", "UNKNOWN", 0),
        (EU, LOST_S + 1, "FINISHED", "FOLLOWS", 0),
        (None, 1.0, "RUNNING", "UNKNOWN", 0),
    ],
)
def test_a_mirror_is_as_far_as_the_syncer_says(
    heartbeat: MirrorHeartbeat | None, age_s: float, phase: str, state: str, behind: int
) -> None:
    found = mirror_of(with_region(heartbeat, age_s, phase))
    assert (found.state, found.commits_behind) == (state, behind)


def test_what_crosses_is_counted_and_priced_by_where_it_leaves() -> None:
    found = mirror_of(with_region(EU))
    assert (found.up_bytes, found.down_bytes, found.offers) == (2_000_000_000, 3_000_000_000, 4)
    assert (found.requests, found.writes) == (1200, 300)
    assert found.egress_cost == pytest.approx(2 * 0.5 + 3 * 0.1)
    assert status_of(facts()).mirrors == [], "a run without regions' buckets says nothing of them"


def test_screens_tell_the_lag_and_the_last_error_without_control_characters() -> None:
    late = with_region(replace(EU, behind=4, behind_s=61.0, error="create fails:\x1b[2J 503"))
    line = next(line for line in status_text(status_of(late)).splitlines() if line.startswith("region eu"))
    assert line.startswith("region eu   behind   4 commits behind for 61 s   4 offers carried home")
    assert "2 GB to it, 3 GB from it   1,200 requests, 300 of them writes   egress costs 1.3" in line
    assert "\\x1b[2J 503" in line and "\x1b" not in line
    summary = summary_of(with_region(EU, phase="FINISHED"))
    assert summary.mirrors[0].region == "eu" and "region eu   follows   4 offers" in summary_text(summary)


def test_a_learner_that_is_not_heard_is_named_with_what_to_do() -> None:
    known = with_region(replace(EU, unheard={"rhine": "offer/rhine/1/3: other bytes; start rhine again"}))
    status = status_of(known)
    assert status.mirrors[0].state == "FOLLOWS", "the region's other learners go on"
    assert "not heard: rhine" in status_text(status)
    (note,) = [learner.note for learner in status.learners if learner.name == "rhine"]
    assert note == "not heard: offer/rhine/1/3: other bytes; start rhine again"
