"""Slots of a simulated fleet: the product decides, and the expected values are worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_cli.protocol import quorum
from diloco_cli.protocol.quorum import Decision, Grace, Pace, SlotFacts
from diloco_cli.simulate import slots
from diloco_cli.simulate.chips import DAY_MS, equal_learners
from diloco_cli.simulate.published import PUBLISHED
from diloco_cli.simulate.slots import FAR_MS, MergeRules, SlotMemory, SlotView, decide, merge_all
from diloco_cli.simulate.stepwise import walk

ALIVE = 15_000


def view(reports: tuple[int, ...], alive_until: tuple[int, ...], opened: int = 0) -> SlotView:
    """Slots of 5 s, overlap 2, 1 s to synchronise: slack 2 x 5 - 1 = 9 s, a window of half of it: 4.5 s."""
    return SlotView(reports, alive_until, opened, 5000, Pace(5.0, 0.0, 1.0))


def test_all_alive_are_here_so_nobody_waits_for_the_window() -> None:
    outcome = decide(view((0, 4000, 4400), (ALIVE,) * 3), MergeRules())
    assert (outcome.action, outcome.at_ms, outcome.participants) == ("merge", 4400, (0, 1, 2))


def test_the_window_ends_without_the_one_that_is_late() -> None:
    outcome = decide(view((0, 4000, 4600), (ALIVE,) * 3), MergeRules())
    assert (outcome.at_ms, outcome.participants, outcome.alive) == (4500, (0, 1), 3)
    assert outcome.share == pytest.approx(2 / 3)


def test_nobody_waits_for_a_learner_that_is_gone() -> None:
    outcome = decide(view((0, 1000, FAR_MS), (ALIVE, ALIVE, -1)), MergeRules())
    assert (outcome.at_ms, outcome.participants, outcome.alive) == (1000, (0, 1), 2)


def test_a_quorum_that_nobody_can_fill_is_skipped_after_its_time() -> None:
    outcome = decide(view((0, FAR_MS), (ALIVE, ALIVE), opened=-2000), MergeRules(quorum=2, skip_after_s=60.0))
    assert (outcome.action, outcome.at_ms) == ("skip", 58_000)


def test_every_slot_is_decided_by_the_syncers_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may decide on its own: one slot, at least one question, and the answer counts."""
    names = ("decide_slot", "grace_window", "alive_within_s", "measured_pace")
    assert all(getattr(slots, name) is getattr(quorum, name) for name in names)
    asked: list[SlotFacts] = []
    original: Callable[[SlotFacts, Grace, float], Decision] = quorum.decide_slot

    def listening(facts: SlotFacts, grace: Grace, skip_after_s: float) -> Decision:
        asked.append(facts)
        return original(facts, grace, skip_after_s)

    monkeypatch.setattr(slots, "decide_slot", listening)
    learners = equal_learners(600_000, 4, PUBLISHED)
    timelines = [walk(learner, DAY_MS // 100, slots.np.random.default_rng(i)) for i, learner in enumerate(learners)]
    merges = merge_all(timelines, MergeRules(), SlotMemory(remember=False))
    assert len(asked) >= len(merges.at_ms) > 100
    monkeypatch.setattr(slots, "decide_slot", lambda facts, grace, skip: Decision("skip", "never merge"))
    assert merge_all(timelines, MergeRules(), SlotMemory(remember=False)).at_ms == []
