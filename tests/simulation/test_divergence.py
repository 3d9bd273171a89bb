"""Histories in which deltas of usual size do harm, and only the held-out loss shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.histories.campaign import lived
from tests.histories.options import Options, drawn_options
from tests.histories.replayer import in_one
from tests.histories.script import CallFault, HistoryResult, NemesisEvent, Script

BAD, SEED = "l1", 11
MANY = 2.0  # an event that lasts longer than 1 s is of many offers


def options(**changes: Any) -> Options:
    """Three learners in a quiet run that is evaluated every round."""
    quiet = replace(
        drawn_options(SEED).without_faults(), learners=3, syncers=1, standbys=0, fragments=2, quorum=1, apart=0,
        merges=50, mixing="replace", feedback=False, overlap="auto", local_steps="measured",
        steps_a_slot=2, step_s=0.1, slowest=1.0, latency_s=0.001, evaluates_every=1, faulty_share=0.9, signed=False,
        cold_rounds=0, snapshot_every=4, kept_rounds=2, skip_after_s=2.0,
    )  # fmt: skip
    return replace(quiet, **changes)


def harmed(*calls: CallFault, for_s: float = MANY, **changes: Any) -> tuple[HistoryResult, list[Any]]:
    """Harm is done after about 10 merges. The result, and what the log says beside merges."""
    events = (NemesisEvent(2.0, "harm", BAD, for_s),)
    result = lived(SEED, options(**changes), script=Script(calls, events))
    return result, [in_one(data) for data in result.log if b'"kind":"merge"' not in data]


def of(kind: str, log: list[Any]) -> list[Any]:
    return [commit for commit in log if commit["kind"] == kind]


def test_harm_that_goes_on_is_undone_once_and_then_the_run_pauses_until_operators_resume_it() -> None:
    result, log = harmed()
    assert result.violation is None
    back, stop = of("rollback", log)[0], of("stop", log)[0]
    assert back["evaluated"] is not None and stop["diverged"] and back["n"] < stop["n"]
    assert "diloco quarantine LEARNER" in stop["reason"] and "diloco resume" in stop["reason"]
    assert log[-1]["kind"] == "finish"


def test_harm_of_a_few_deltas_is_undone_and_the_run_goes_on() -> None:
    result, log = harmed(for_s=0.5)
    assert result.violation is None
    assert len(of("rollback", log)) == 1 and not of("stop", log) and log[-1]["kind"] == "finish"
