"""What a training loop decides between its steps."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.actors.progress import OfferDraft, awaits_last, is_over, merge_is_due, save_is_due, waited_for
from diloco_cli.protocol.log.state import RunState
from tests.unit.protocol.records import follow, genesis, output

AT_TAU = replace(SyncSettings(), adoption="at_tau", overlap=2)


def draft(slot: int, base: int = 0) -> OfferDraft:
    return OfferDraft(0, slot, 0, output(0, base, -1), 0, 8, 2, None)


def log(head: int, *merged: int, base_floor: int = 0) -> RunState:
    """Two fragments, `head` slots long; `merged`: the newest merged slot of each fragment."""
    outputs = tuple(output(fragment, slot + 1, slot) for fragment, slot in enumerate(merged))
    return RunState(slot=head, outputs=outputs, base_floor=base_floor)


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
def test_a_stop_from_before_does_not_end_the_run(kind: str, began_before: bool, over: bool) -> None:
    fields: dict[str, Any] = {"slot": 0} if kind == "skip" else {}
    state = follow(genesis(), kind, **fields)
    assert is_over(state, state.n - 1 if began_before else state.n) is over


@pytest.mark.parametrize(
    ("outcomes", "time", "stays"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_leaver_stays_for_the_outcomes_of_its_offers_while_there_is_time(
    outcomes: bool, time: bool, stays: bool
) -> None:
    state = genesis()
    assert awaits_last(outcomes, time, state, state.n) is stays
    assert not awaits_last(outcomes, time, follow(state, "finish"), state.n)


def test_a_merge_is_adopted_tau_slots_after_its_own() -> None:
    assert [next_slot for next_slot in range(8) if merge_is_due(AT_TAU, draft(3), next_slot)] == [6, 7]
    assert not merge_is_due(replace(AT_TAU, adoption="on_arrival"), draft(3), 7)
    assert not merge_is_due(replace(AT_TAU, overlap="auto"), draft(3), 7)


def test_the_wait_for_a_merge_ends_with_it_or_with_a_later_one_of_the_fragment() -> None:
    """An offer of fragment 0 for slot 4; the log as far as it is known, and the version that has arrived."""
    mine = draft(4)
    assert waited_for(mine, output(0, 3, 2), None, log(4, 2, 3)) == "to come"
    assert waited_for(mine, output(0, 3, 2), output(0, 3, 2), log(4, 2, 3)) == "to come", "that is the merge before it"
    assert waited_for(mine, output(0, 3, 2), None, log(5, 4, 3)) == "to come", "merged, and its version is on its way"
    assert waited_for(mine, output(0, 3, 2), output(0, 5, 4), log(5, 4, 3)) == "here"
    assert waited_for(mine, output(0, 3, 2), output(0, 7, 6), log(7, 6, 5)) == "here"


def test_a_merge_that_a_skip_or_a_rollback_has_taken_the_place_of_is_not_waited_for() -> None:
    mine = draft(4, base=3)
    assert waited_for(mine, output(0, 3, 2), None, log(5, 2, 3)) == "never", "slot 4 was skipped"
    assert waited_for(mine, output(0, 3, 2), None, log(4, 2, 3, base_floor=3)) == "to come"
    assert waited_for(mine, output(0, 3, 2), None, log(4, 2, 3, base_floor=4)) == "never", (
        "its base lies behind a rollback"
    )
    assert waited_for(mine, output(0, 3, 2), output(0, 7, 4), log(5, 4, 3, base_floor=4)) == "never"
    assert waited_for(mine, output(0, 5, 4), None, log(5, 4, 3)) == "never", "its merge was adopted at the drift bound"


def test_a_save_is_due_once_every_so_many_rounds() -> None:
    """Of four steps each; what was missed while nothing could be saved is not made up for."""
    saved_at, saves = 0, []
    for steps in range(1, 40):
        if steps not in (8, 9) and save_is_due(steps, 4, 2, saved_at):
            saved_at = steps
            saves.append(steps)
    assert saves == [10, 16, 24, 32]
    assert not any(save_is_due(steps, 4, 0, 0) for steps in range(40))
