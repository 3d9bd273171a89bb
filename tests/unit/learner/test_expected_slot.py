"""A learner's own idea of a slot's time stays near what its steps take, however long it stood still."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diloco_cli.learner.exchange import Exchange


@pytest.mark.parametrize(
    ("slot_s", "step_s", "expected_s"),
    [
        (1.1, 0.5, 1.1),  # 24 steps of 0.5 s for 12 slots: 1 s each
        (3600.0, 0.5, 4.0),  # after an outage of hours: at most four times that
        (0.01, 0.5, 0.5),
        (7.0, 0.0, 7.0),  # no step yet
    ],
)
def test_a_slot_is_no_multiple_of_its_steps(slot_s: float, step_s: float, expected_s: float) -> None:
    exchange = Exchange.__new__(Exchange)
    exchange._slot_s, exchange._step_s = slot_s, step_s
    exchange.progress = SimpleNamespace(local_steps=24)  # type: ignore[assignment]
    exchange.run = SimpleNamespace(num_fragments=12)  # type: ignore[assignment]
    assert exchange._expected_slot_s() == pytest.approx(expected_s)
