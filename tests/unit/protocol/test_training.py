"""What a training loop decides between its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.progress import Draft
from diloco_cli.protocol.records import CommitKind
from diloco_cli.protocol.training import awaits_last, is_over, merge_is_due, save_is_due, waited_for
from tests.unit.protocol.records import follow, genesis, output

AT_TAU = replace(SyncSettings(), adoption="at_tau", overlap=2)


def draft(slot: int, base: int = 0) -> Draft:
    return Draft(0, slot, 0, output(0, base, -1), 0, 8, 2, None, (), None, ())


@pytest.mark.parametrize(
    ("kind", "began_before", "over"),
    [
        ("finish", True, True),
        ("stop", True, True),
        ("skip", True, False),
        ("finish", False, True),
        ("stop", False, False),
    ],
)
def test_a_stop_from_before_does_not_end_the_run(kind: CommitKind, began_before: bool, over: bool) -> None:
    fields: dict[str, Any] = {"slot": 0} if kind == "skip" else {}
    state = follow(genesis(), kind, **fields)
    assert is_over(state, state.n - 1 if began_before else state.n) is over


@pytest.mark.parametrize(("fates", "time", "stays"), [(True, True, True), (False, True, False), (True, False, False)])
def test_a_leaver_stays_for_the_fates_of_its_offers_while_there_is_time(fates: bool, time: bool, stays: bool) -> None:
    state = genesis()
    assert awaits_last(fates, time, state, state.n) is stays
    assert not awaits_last(fates, time, follow(state, "finish"), state.n)


def test_a_merge_is_adopted_tau_slots_after_its_own() -> None:
    assert [next_slot for next_slot in range(8) if merge_is_due(AT_TAU, draft(3), next_slot)] == [6, 7]
    assert not merge_is_due(replace(AT_TAU, adoption="on_arrival"), draft(3), 7)


def test_the_wait_for_a_merge_ends_with_it_or_with_a_rollback() -> None:
    mine = draft(3, base=5)
    assert waited_for(mine, None, 0) == waited_for(mine, output(0, 6, 2), 5) == "to come"
    assert waited_for(mine, output(0, 7, 3), 5) == waited_for(mine, output(0, 9, 5), 0) == "here"
    assert waited_for(mine, None, 6) == waited_for(mine, output(0, 7, 3), 6) == "never"


def test_a_save_is_due_once_every_so_many_rounds() -> None:
    """Of four steps each; what was missed while nothing could be saved is not made up for."""
    saved_at, saves = 0, []
    for steps in range(1, 40):
        if steps not in (8, 9) and save_is_due(steps, 4, 2, saved_at):
            saved_at = steps
            saves.append(steps)
    assert saves == [10, 16, 24, 32]
    assert not any(save_is_due(steps, 4, 0, 0) for steps in range(40))
