"""A curve that is bounded shows all of a run, however long that is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diloco_cli.protocol.log.metrics import thinned

Curve = list[tuple[float, float]]


def curve_of(values: Sequence[float], most: int) -> Curve:
    found: Curve = []
    for n, at in enumerate(values):
        found = thinned([*found, (at, float(n))], most, lambda point: point[0])
        assert len(found) <= most
    return found


@pytest.mark.parametrize("count", [10, 512, 1_000, 30_000])
def test_every_tenth_of_a_run_has_its_share_of_the_points(count: int) -> None:
    """The newest may have more: all that came since the curve was full."""
    found = curve_of(range(count), 512)
    assert found[0][0] == 0 and found[-1][0] == count - 1
    tenths = [sum(part <= 10 * at / count < part + 1 for at, _ in found) for part in range(10)]
    assert min(tenths) >= min(count, 250) // 20, tenths


@pytest.mark.parametrize("values", [[1.0] * 3_000, [float(n % 700) for n in range(3_000)]])
def test_it_is_bounded_where_time_stands_still_or_goes_back(values: list[float]) -> None:
    found = curve_of(values, 100)
    assert found[-1][1] == 2_999
