"""A few situations of one run, and their verdicts; all of them: python -m tests.studies.situations"""

from __future__ import annotations

from tests.studies.situations import SAMPLE, staged


def test_a_run_that_is_well_hangs_or_is_stopped_is_told_apart_in_time() -> None:
    assert staged(SAMPLE) == []
