"""A sweep where the store does not delete all that it is asked to, and how much garbage waits."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.protocol.actors.collection import BATCH, NOT_KNOWN, SAMPLE_EVERY_S, Backlog, Sweep
from diloco_cli.protocol.log.operations import Delete, List, Together, Undeleted
from diloco_cli.protocol.log.state import RunState


def test_before_the_first_sweep_ends_only_what_it_has_found_is_known() -> None:
    """Nor is what it goes on to find a trend."""
    backlog = Backlog()
    for found in (0, 12, 40):
        said = backlog.at(50, deleted=7, found=found, now_s=found * SAMPLE_EVERY_S)
        assert (said.objects, said.commits, said.per_h) == (found, NOT_KNOWN, 0.0)
    backlog.swept_to(50, deleted=40)
    said = backlog.at(50, 40, 0, 99.0 * SAMPLE_EVERY_S)
    assert (said.objects, said.commits, said.per_h) == (0, 0, 0.0)


def test_a_backlog_is_what_so_many_commits_have_left_behind() -> None:
    backlog = Backlog()
    backlog.swept_to(50, deleted=9_999)  # all that earlier processes had left
    backlog.swept_to(60, deleted=40)
    found = backlog.at(75, deleted=0, found=0, now_s=0.0)
    assert (found.commits, found.objects) == (15, 60)
    assert backlog.at(75, deleted=20, found=25, now_s=1.0).objects == 40, "the sweep that goes on has deleted some"
    assert backlog.at(75, deleted=60, found=25, now_s=2.0).objects == 25, "what it has found is there"


def test_the_trend_is_that_of_the_last_minutes_and_a_saw_has_none() -> None:
    growing, saw = Backlog(), Backlog()
    for backlog in (growing, saw):
        backlog.swept_to(0, 0)
    for k in range(20):
        now_s = k * SAMPLE_EVERY_S
        rising = growing.at(0, 0, found=10 * k, now_s=now_s)
        teeth = saw.at(0, 0, found=100 * (k % 2), now_s=now_s)
    assert rising.per_h == 1200.0 and teeth.per_h == 0.0
    assert Backlog().at(0, 0, 5, 0.0).per_h == 0.0


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
