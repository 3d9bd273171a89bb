"""A small form of what a learner holds beyond its resident part, in a real one beside a real syncer."""

from __future__ import annotations

from tests.benchmarks.learner_memory import GOAL, ROWS, cases, measured

MILLIONS, FRAGMENTS = 8, 2
REST_BYTES = 16e6  # what a process allocates for itself once it has built its model


def test_a_learner_offers_and_adopts_within_two_fragments() -> None:
    """Values that were sent are held until the offer is in the bucket, so that more than one fragment must be seen."""
    peaks = measured(cases(FRAGMENTS)[0], MILLIONS, commits=4)
    unit, rest = 4 * MILLIONS * 2**20 / FRAGMENTS, peaks.rest
    assert abs(rest) < REST_BYTES
    tops = {what.name: peaks.of(what) for what in ROWS if what.bound}
    beyond = {name: (top - rest) / unit for name, top in tops.items() if top is not None}
    assert set(beyond) == {"offering", "adopting"}
    assert all(0.9 < most < GOAL for most in beyond.values()), beyond
