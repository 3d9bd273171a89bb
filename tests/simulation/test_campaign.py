"""`python -m tests.histories` from outside: its exit status and its story."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.histories import __main__ as command
from tests.histories.campaign import Totals, Violation


def test_a_violation_ends_with_status_11_and_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story = ("seed 7: 2 learners", "  l0.1, operation 3: dies", "invariant 2: merged twice")
    violation = Violation(7, "2", story, "python -m tests.histories --seed 7 --histories 1")

    def found(*arguments: Any) -> Totals:
        return Totals(5, 900, [13, 13, 14], [violation])

    monkeypatch.setattr(command, "campaign", found)
    monkeypatch.setattr(sys, "argv", ["histories", "--histories", "3"])
    assert command.main() == 11
    out = capsys.readouterr().out
    assert out.index("merged twice") < out.index(f"repeat it: {violation.command}") < out.index("40 commits (median 13")
