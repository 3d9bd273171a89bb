"""A net that catches nothing proves nothing: each of the known mutants is caught by the very histories that the
product survives, and by the invariant that is meant for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.histories.campaign import lived
from tests.histories.options import Options, drawn_options
from tests.histories.replayer import ViolationError
from tests.simulation.mutants import MUTANTS, OF_COLLECTORS, OF_LEARNERS, OF_SYNCERS, OF_THE_LOG, Mutant

MAX_HISTORIES = 60  # of those that fit, in which the mutant has to show: most do in the first few
WITHIN_SEEDS = 1000


def fitting(mutant: Mutant) -> Iterator[tuple[int, Options]]:
    for seed in (*range(mutant.since, WITHIN_SEEDS), *range(mutant.since)):
        options = drawn_options(seed)
        if mutant.needs(options):
            yield seed, mutant.lasting(options)


def caught(mutant: Mutant, most: int) -> tuple[int, ViolationError] | None:
    """The first seed that shows it, and how."""
    for _, (seed, options) in zip(range(most), fitting(mutant), strict=False):
        violation = lived(seed, options, mutant.actors, other_walls=mutant.walls).violation
        if violation is not None:
            return seed, violation
    return None


def test_there_are_more_than_fifty_and_nearly_half_of_them_in_the_learner() -> None:
    sizes = [len(kind) for kind in (OF_THE_LOG, OF_COLLECTORS, OF_SYNCERS, OF_LEARNERS)]
    assert sizes == [12, 9, 28, 28] and len(MUTANTS) == sum(sizes)


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_caught_by_the_invariant_that_is_meant_for_it(name: str) -> None:
    mutant = MUTANTS[name]
    found = caught(mutant, MAX_HISTORIES)
    assert found is not None, f"{MAX_HISTORIES} histories, and nobody noticed"
    assert found[1].invariant in mutant.broken, found


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_caught_again_and_again_within_so_many_seeds(name: str) -> None:
    """By nothing but the swarm as it is: no seed is left out, and wall clocks are compared where a campaign does. What
    shows only in longer histories is looked for in those that fit."""
    mutant, seeds, broken = MUTANTS[name], [], set()
    swarm = ((seed, drawn_options(seed)) for seed in range(WITHIN_SEEDS))
    for seed, options in fitting(mutant) if mutant.longer else swarm:
        violation = lived(seed, options, mutant.actors).violation
        if violation is not None:
            seeds.append(seed)
            broken.add(violation.invariant)
        if len(seeds) == 3:
            break
    print(f"{name}: seeds {seeds}, invariants {sorted(broken)}")
    assert len(seeds) == 3 and broken & mutant.broken
