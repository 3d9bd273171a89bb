"""Who serves, who stands by, and what `status` says where nobody serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from diloco_cli.observe.facts import Heard, RunFacts
from diloco_cli.observe.render import status_text
from diloco_cli.observe.status import FORGOTTEN_S, LOST_S, SUSPECT_S, status_of
from diloco_cli.protocol.log.heartbeats import SyncerHeartbeat
from tests.unit.observe.test_status import STATE, facts

WAITING = SyncerHeartbeat("STANDING_BY", 2, 9, "laptop", "takes over after 18 s of silence", unit="standby-1")


def with_standby(spoken: RunFacts, age_s: float = 1.0, **heartbeat: str) -> RunFacts:
    return replace(spoken, standbys={"standby-1": Heard(replace(WAITING, **heartbeat), age_s)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("age_s", "said", "state"),
    [
        (SUSPECT_S, "STANDING_BY", "STANDING_BY"),
        (SUSPECT_S + 1, "STANDING_BY", "SUSPECT"),
        (LOST_S + 1, "STANDING_BY", "LOST"),
        (FORGOTTEN_S + 1, "STANDING_BY", None),
        (1.0, "DONE", None),
    ],
)
def test_standbys_are_shown_by_age_and_those_that_took_over_are_not(age_s: float, said: str, state: str | None) -> None:
    shown = status_of(with_standby(facts(), age_s, state=said)).standbys
    assert [item.state for item in shown] == ([] if state is None else [state])


def test_nobody_stands_by_for_a_run_that_is_over() -> None:
    assert status_of(with_standby(facts(structs.replace(STATE, phase="FINISHED")))).standbys == []


def test_a_syncer_that_is_heard_speaks_for_itself() -> None:
    assert status_of(facts()).reason == "2 of 2"


def test_where_no_syncer_serves_the_reason_says_so_and_what_comes_next() -> None:
    lost = status_of(facts(syncer=47.0)).reason
    assert lost == "no syncer serves: syncer on box was heard 47 s ago; start one: diloco syncer file:///b/nano"
    covered = status_of(with_standby(facts(syncer=SUSPECT_S + 1))).reason
    assert covered.startswith("no syncer serves") and covered.endswith("standby-1 will take over")
    assert (
        status_of(with_standby(facts(syncer=None))).reason == "no syncer has been heard yet; standby-1 will take over"
    )
    both_lost = status_of(with_standby(facts(syncer=47.0), LOST_S + 1)).reason
    assert "start one: diloco syncer" in both_lost
    assert status_of(facts(structs.replace(STATE, phase="STOPPED"), syncer=47.0)).reason == ""


def test_the_screen_names_who_serves_and_who_waits() -> None:
    spoken = with_standby(facts())
    assert spoken.syncer is not None
    serving = replace(spoken.syncer, heartbeat=replace(spoken.syncer.heartbeat, unit="standby-iowa"))
    rows = status_text(status_of(replace(spoken, syncer=serving))).splitlines()
    assert any(row.startswith("syncer ") and "epoch 2 by standby-iowa" in row for row in rows)
    assert any(row.startswith("standby-1 ") and "STANDING_BY" in row and "on laptop" in row for row in rows)
    nobody = status_text(status_of(facts(syncer=None))).splitlines()
    assert any(row.startswith("syncer ") and "no syncer has been heard yet" in row for row in nobody)
