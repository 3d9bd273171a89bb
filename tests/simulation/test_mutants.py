"""A net that catches nothing proves nothing: each of the known mutants is caught by a history that the product survives
(test_histories.py runs the same seeds), and by the invariant that is meant for it."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, seeds


def test_each_mutant_names_its_seed() -> None:
    assert len(MUTANTS) > 60 and seeds().keys() == MUTANTS.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_its_seed_shows_it_by_the_invariant_that_is_meant_for_it(name: str) -> None:
    violation = MUTANTS[name].violation(seeds()[name])
    assert violation is not None and violation.invariant in MUTANTS[name].broken, (
        f"{violation}; find another seed: python -m tests.simulation.mutants"
    )
