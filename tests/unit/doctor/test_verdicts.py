"""The pure parts: what a race proves, what a clock's skew means, what kept objects cost, which role credentials fit."""

from __future__ import annotations

import pytest

from diloco_cli.doctor.checks import finding_of, skew_finding
from diloco_cli.doctor.races import fault_of_round
from diloco_cli.doctor.racing_processes import RaceAnswer
from diloco_cli.doctor.retention import Retention, monthly_cost, retention_finding
from diloco_cli.store.port import ObjectStat

A, B = b"a's bytes", b"b's bytes"
WON = RaceAnswer(True, A)
LOST = RaceAnswer(False, A)
MUTE = RaceAnswer(False, trouble="no answer")


@pytest.mark.parametrize(
    ("answers", "final", "fault"),
    [
        ([WON, LOST], A, ""),
        ([WON, MUTE], A, ""),
        ([MUTE, LOST], A, ""),  # the one without an answer has won
        ([WON, RaceAnswer(True, B)], B, "2 of 2 racers were told"),
        ([LOST, LOST], A, "no racer was told"),
        ([WON, LOST], B, "a loser's bytes"),
        ([WON, RaceAnswer(False, B)], A, "other bytes than the winner's"),
        ([WON, LOST], None, "is not there"),
        ([WON, LOST], b"torn", "no racer wrote"),
    ],
)
def test_a_round_is_right_if_one_wins_and_all_agree(answers: list[RaceAnswer], final: bytes | None, fault: str) -> None:
    found = fault_of_round([A, B], answers, final)
    assert fault in found if fault else found == ""


@pytest.mark.parametrize(
    ("modified_s", "level", "said"),
    [
        (1000.5, "pass", "within 1 s"),
        (999.0, "pass", "within 1 s"),  # a store that tells whole seconds
        (1004.0, "pass", "within 3 s"),
        (1061.0, "warn", "60 s ahead of"),
        (940.0, "warn", "60 s behind"),
        (2801.0, "warn", "30 min ahead of"),
    ],
)
def test_a_clock_is_judged_by_how_far_it_lies_outside_of_the_write(modified_s: float, level: str, said: str) -> None:
    found = skew_finding(ObjectStat("k", 1, modified_s), before_s=1000.0, after_s=1001.0)
    assert (found.level, said in found.detail) == (level, True)
    assert ("refused" in found.hint) == (abs(modified_s - 1000) > 300)


def test_what_is_kept_for_a_week_costs_seven_days_of_writing() -> None:
    assert monthly_cost(100, 7 * 86_400) == pytest.approx(100 * 7 * 0.02)  # $14
    week = retention_finding(Retention(604_800, "turn it off"), 1000.0)
    assert week.level == "warn" and "$140.00 a month for this run's 1 TB a day" in week.detail
    assert "7 d" in week.detail and "turn it off" in week.hint
    assert retention_finding(Retention(0, ""), 1000.0).level == "pass"
    assert "until it is removed for good" in retention_finding(Retention(None, "x"), None).detail


@pytest.mark.parametrize(
    ("allowed", "level", "said"),
    [
        (("create", "read", "overwrite", "list", "delete"), "pass", "a learner and a syncer"),
        (("create", "read", "list", "delete"), "warn", "a learner and a syncer"),
        (("create", "read", "list"), "warn", "enough for a learner"),
        (("create", "read"), "warn", "not enough for a run"),
        (("read", "list"), "warn", "not enough for a run"),
        ((), "warn", "nothing: not enough"),
    ],
)
def test_credentials_fit_the_roles_whose_needs_they_cover(allowed: tuple[str, ...], level: str, said: str) -> None:
    found = finding_of(allowed)
    assert (found.level, said in found.detail) == (level, True)
    assert ("no heartbeats" in found.hint) == ("overwrite" not in allowed)
