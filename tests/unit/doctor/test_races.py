"""What a round of a race proves."""

from __future__ import annotations

import pytest

from diloco_cli.doctor.races import RaceAnswer, fault_of_round

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
