"""Bad deltas cost at most what README.md's table says."""

from __future__ import annotations

import pytest

from tests.security.bad_deltas import BAD, held


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "nan" else pytest.mark.long) for name in BAD])
def test_bad_deltas_do_bounded_harm(name: str) -> None:
    holds, told = held(name)
    assert holds, told
