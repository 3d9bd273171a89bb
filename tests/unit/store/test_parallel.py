"""How many calls go at a time."""

from __future__ import annotations

import threading

import pytest

from diloco_cli.config.settings import MAX_CONNECTIONS
from diloco_cli.errors import UsageError
from diloco_cli.store.parallel import CONNECTIONS_VARIABLE, answers, connections_here


def test_a_machine_may_have_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connections_here() == MAX_CONNECTIONS
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "1")
    gate = threading.Lock()

    def alone(item: int) -> int:
        with_nobody = gate.acquire(blocking=False)
        assert with_nobody
        gate.release()
        return item

    assert list(answers(alone, range(20))) == list(range(20))


@pytest.mark.parametrize("setting", ["0", "49", "many", "-1"])
def test_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(CONNECTIONS_VARIABLE, setting)
    with pytest.raises(UsageError, match="not a number of connections"):
        connections_here()
