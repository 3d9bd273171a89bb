"""How long an operator's command waits for the syncer. What it asks for is tested in tests/cli/test_operators.py."""

from __future__ import annotations

import pytest

from diloco_cli.syncer.operator import max_silence_s


@pytest.mark.parametrize(
    ("timeout_s", "heartbeat", "silence_s"),
    [
        (None, None, 10.0),
        (None, b'{"slowest_s":3}', 10.0),
        (None, b'{"slowest_s":40}', 80.0),
        (None, b'{"slowest_s":1000000000}', 600.0),
        (0.0, b'{"slowest_s":40}', 0.0),
    ],
)
def test_a_slow_syncer_is_not_taken_for_a_dead_one(
    timeout_s: float | None, heartbeat: bytes | None, silence_s: float
) -> None:
    assert max_silence_s(timeout_s, heartbeat) == silence_s
