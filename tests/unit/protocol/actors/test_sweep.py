"""A sweep where the store does not delete all that it is asked to."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.protocol.actors.collection import BATCH, Sweep
from diloco_cli.protocol.log.operations import Delete, List, Together, Undeleted
from diloco_cli.protocol.log.state import RunState


class Everything(Sweep):
    def is_garbage(self, key: str, epoch: int) -> bool:
        return True


def swept(answers: dict[str, Undeleted], keys: list[str]) -> tuple[Sweep, list[str]]:
    """The sweep at its end, and the keys that it tried to delete: those of some kinds have these answers."""
    tried: list[str] = []

    def answered(operation: Any) -> Any:
        if isinstance(operation, Together):
            return [answered(one) for one in operation.operations]
        if isinstance(operation, List):
            found = [key for key in sorted(keys) if key.startswith(operation.prefix) and key > operation.after]
            return found[: operation.limit]
        assert isinstance(operation, Delete)
        tried.append(operation.key)
        return answers.get(operation.key.partition("/")[0])

    sweep = Everything(RunState())
    while not sweep.is_done:
        steps, answer = sweep.step(1), None
        try:
            while True:
                answer = answered(steps.send(answer))
        except StopIteration:
            continue
    return sweep, tried


KEYS = [f"{kind}/{number:04d}" for kind in ("delta", "offer", "weights") for number in range(10 * BATCH)]


def test_a_kind_that_may_not_be_deleted_is_left_and_the_others_go() -> None:
    sweep, tried = swept({"delta": Undeleted.REFUSED}, KEYS)
    assert sweep.deleted == 20 * BATCH and set(KEYS[10 * BATCH :]) <= set(tried)
    assert sum(key.startswith("delta/") for key in tried) == BATCH


@pytest.mark.parametrize("why", Undeleted)
def test_only_what_is_gone_counts_as_deleted(why: Undeleted) -> None:
    sweep, tried = swept({"offer": why}, KEYS)
    assert sweep.deleted == 20 * BATCH < len(tried)
