"""Bad deltas cost at most what README.md's table says."""

from __future__ import annotations

import pytest

from tests.security.bad_deltas import BAD, SEEDS, held


def test_deltas_that_are_no_numbers_do_no_harm() -> None:
    holds, told = held("nan", SEEDS[:1], rounds=4)
    assert holds, told


@pytest.mark.long
@pytest.mark.parametrize("name", BAD)
def test_bad_deltas_do_bounded_harm(name: str) -> None:
    holds, told = held(name)
    assert holds, told
