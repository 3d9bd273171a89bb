"""`status` on garbage: how much waits to be deleted, and whether deletions keep pace."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from diloco_cli.observe.facts import Heard
from diloco_cli.observe.screen import status_text
from diloco_cli.observe.status import GarbageStatus, Status, status_of
from diloco_cli.protocol.actors.backlog import NOT_KNOWN
from diloco_cli.protocol.actors.collection import kept_commits
from diloco_cli.protocol.log.heartbeats import GarbageHeartbeat
from tests.unit.observe.test_status import RUN, STATE, SYNCER, facts

KEPT = kept_commits(RUN) or 0


def told(commits: int) -> Status:
    garbage = GarbageHeartbeat(objects=1234, commits=commits, per_h=60.0)
    return status_of(replace(facts(), syncer=Heard(replace(SYNCER, garbage=garbage), 1.0)))


def test_what_waits_is_shown_with_its_trend_and_is_no_warning() -> None:
    status = told(KEPT)
    assert status.garbage == GarbageStatus(1234, KEPT, 60.0, "")
    assert "garbage: about 1,234 objects wait to be deleted, +60 an hour" in status_text(status)


def test_more_than_the_run_keeps_is_a_warning() -> None:
    status = told(KEPT + 1)
    assert status.garbage is not None and f"more than the {KEPT:,} commits" in status.garbage.note
    assert f"garbage: {status.garbage.note}" in status_text(status)


def test_before_a_syncer_s_first_sweep_has_ended_it_is_not_known_and_said_so() -> None:
    """In a run that has no floor yet, nothing can wait."""
    found = told(NOT_KNOWN)
    assert found.garbage == GarbageStatus(1234, 0, 0.0, "")
    collected = facts(structs.replace(STATE, gc_floor=5))
    spoken = replace(SYNCER, garbage=GarbageHeartbeat(objects=0, commits=NOT_KNOWN))
    status = status_of(replace(collected, syncer=Heard(spoken, 1.0)))
    assert status.garbage == GarbageStatus(0, None, None, "")
    assert "garbage: how much waits to be deleted is not known yet, 0 objects were found so far" in status_text(status)


def test_where_nothing_waits_or_no_syncer_speaks_there_is_no_line() -> None:
    assert "garbage" not in status_text(status_of(facts())) + status_text(status_of(facts(syncer=None)))
    assert status_of(facts(syncer=None)).garbage is None
