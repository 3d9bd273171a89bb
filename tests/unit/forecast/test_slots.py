"""Slots of a simulated fleet: the product decides, and the expected values are worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from diloco_cli.forecast import slots
from diloco_cli.forecast.chips import DAY_MS, FAR_MS, equal_learners, generator, timeline, walk
from diloco_cli.forecast.goodput import PUBLISHED
from diloco_cli.forecast.slots import MergeRules, SlotMemory, SlotView, decide, merge_all, step_ends_ms
from diloco_cli.protocol.rules import quorum
from diloco_cli.protocol.rules.quorum import Grace, Pace, SlotDecision, SlotFacts, decide_slot, grace_window, patience_s

ALIVE = 15_000


def view(reports: tuple[int, ...], alive_until: tuple[int, ...], opened: int = 0) -> SlotView:
    """Slots of 5 s, overlap 2, 1 s to synchronise: slack 2 x 5 - 1 = 9 s, a window of half of it: 4.5 s."""
    return SlotView(reports, alive_until, opened, 5000, Pace(5.0, 0.0, 1.0))


@pytest.mark.parametrize(
    ("reports", "alive_until", "at_ms", "participants", "alive"),
    [
        ((0, 4000, 4400), (ALIVE,) * 3, 4400, (0, 1, 2), 3),  # all alive are here: nobody waits for the window
        ((0, 4000, 4600), (ALIVE,) * 3, 4500, (0, 1), 3),  # it ends without the one that is late
        ((0, 1000, FAR_MS), (ALIVE, ALIVE, -1), 1000, (0, 1), 2),  # one is gone
        ((0, FAR_MS), (ALIVE, 2000), 2001, (0,), 1),  # the last one awaited stops counting as alive
    ],
)
def test_a_slot_ends_when_nobody_is_awaited_any_more_or_with_its_window(
    reports: tuple[int, ...], alive_until: tuple[int, ...], at_ms: int, participants: tuple[int, ...], alive: int
) -> None:
    outcome = decide(view(reports, alive_until), MergeRules())
    assert (outcome.action, outcome.at_ms) == ("merge", at_ms)
    assert (outcome.participants, outcome.alive) == (participants, alive)
    assert outcome.share == pytest.approx(len(participants) / alive)


def test_a_quorum_that_nobody_can_fill_is_skipped_after_its_time() -> None:
    outcome = decide(view((0, FAR_MS), (ALIVE, ALIVE), opened=-2000), MergeRules(quorum=2, skip_after_s=60.0))
    assert (outcome.action, outcome.at_ms) == ("skip", 58_000)


def asked_every_millisecond(view: SlotView, rules: MergeRules) -> tuple[str, int, tuple[int, ...]]:
    """(action, when, who) of a syncer that asks without a break."""
    reached_s: float | None = None
    for now_ms in range(1_000_000):
        present = tuple(m for m, at_ms in enumerate(view.reports) if at_ms <= now_ms)
        if reached_s is None and len(present) >= rules.quorum:
            reached_s = now_ms / 1000
        alive = sum(a <= now_ms or u >= now_ms for a, u in zip(view.reports, view.alive_until, strict=True))
        facts = SlotFacts(
            present=len(present), alive=alive, quorum=rules.quorum, window_from_s=reached_s,
            later_offers=now_ms >= view.slot_ms, waiting_since_s=view.opened / 1000, now_s=now_ms / 1000,
        )  # fmt: skip
        patience = patience_s(rules.skip_after_s, view.pace.slot_s)
        decision = decide_slot(facts, grace_window(rules.overlap, view.pace, rules.gamma), patience)
        if decision.action != "wait":
            return decision.action, now_ms, present
    raise AssertionError("nobody ever decides")


def test_asking_only_at_some_moments_decides_as_asking_every_millisecond() -> None:
    """Reports, deaths, the end of the slot, of the grace and of patience in every order, and at the same moment."""
    chance = random.Random(0)
    slot_ms = 40
    for _ in range(1500):
        learners = chance.randint(1, 4)
        times = range(0, 7 * slot_ms, chance.choice((1, 10)))
        reports = (0, *(chance.choice([*times, FAR_MS]) for _ in range(learners - 1)))
        until = tuple(chance.choice([-1, *times]) for _ in range(learners))
        pace = Pace(slot_ms / 1000, 0.0, chance.choice((0.0, 0.02, 0.2)))
        seen = SlotView(reports, until, -chance.randint(0, 5 * slot_ms), slot_ms, pace)
        rules = MergeRules(quorum=chance.randint(1, 3), skip_after_s=chance.choice((0.0, 0.2, 0.25)))
        outcome = decide(seen, rules)
        found = outcome.action, outcome.at_ms, outcome.participants
        assert found == asked_every_millisecond(seen, rules), (seen, rules)


def test_what_is_cut_off_a_slots_inputs_makes_no_difference() -> None:
    """A quorum reached just before the slot would be skipped still has its grace window."""
    rules = MergeRules(quorum=2, skip_after_s=60.0)
    memory = SlotMemory()
    memory.serve(rules, 5000)
    upcoming, heard, pace = [0, 59_000, 62_000, FAR_MS], [-5000, -5000, -5000, 50_000], Pace(5.0, 0.0, 1.0)
    outcome = memory.outcome(upcoming, heard, 0, 0, memory.same_pace(pace))
    whole = SlotView(tuple(upcoming), (15_000, 15_000, 15_000, 70_000), 0, 5000, pace)
    assert (outcome.action, outcome.at_ms, outcome.participants) == asked_every_millisecond(whole, rules)
    assert outcome.participants == (0, 1, 2) and outcome.at_ms > 60_000


def test_a_memory_that_is_full_starts_anew_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    learners = equal_learners(2_400_000, 4, PUBLISHED)
    timelines = [walk(learner, DAY_MS // 10, generator(i)) for i, learner in enumerate(learners)]
    for rules in (MergeRules(), MergeRules(quorum=2)):
        anew = merge_all(timelines, rules, SlotMemory(remember=False))
        monkeypatch.setattr(slots, "MAX_REMEMBERED", 500)
        memory = SlotMemory()
        small = merge_all(timelines, rules, memory)
        assert (small.at_ms, small.present, small.shares) == (anew.at_ms, anew.present, anew.shares)
        assert small.decided > 500  # many times more than it may keep
        held = (memory._same, memory._alike, memory._paces)
        assert all(len(each) <= 500 // 10 + 2 for each in held)  # ten numbers in a key of four learners


def test_steps_come_in_blocks_however_long_a_stretch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = equal_learners(2048, 1, PUBLISHED)[0]
    made = timeline(learner, 10**6, [(0, 3, 1), (20_000, 12, 1), (90_000, 1, 1)], 0)
    whole = [5000 * k for k in (1, 2, 3)] + [20_000 + 5000 * k for k in range(1, 13)] + [95_000]
    for block in (1, 4, 5, 1000):
        monkeypatch.setattr(slots, "BLOCK", block)
        blocks = list(step_ends_ms(made))
        assert [end for each in blocks for end in each] == whole
        assert max(map(len, blocks)) <= block


def test_every_slot_is_decided_by_the_syncers_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may decide on its own: one slot, at least one question, and the answer counts."""
    names = ("decide_slot", "grace_window", "alive_within_s", "measured_pace")
    assert all(getattr(slots, name) is getattr(quorum, name) for name in names)
    asked: list[SlotFacts] = []
    original: Callable[[SlotFacts, Grace, float], SlotDecision] = quorum.decide_slot

    def listening(facts: SlotFacts, grace: Grace, skip_after_s: float) -> SlotDecision:
        asked.append(facts)
        return original(facts, grace, skip_after_s)

    monkeypatch.setattr(slots, "decide_slot", listening)
    learners = equal_learners(600_000, 4, PUBLISHED)
    timelines = [walk(learner, DAY_MS // 100, generator(i)) for i, learner in enumerate(learners)]
    merges = merge_all(timelines, MergeRules(), SlotMemory(remember=False))
    assert len(asked) >= len(merges.at_ms) > 100
    monkeypatch.setattr(slots, "decide_slot", lambda facts, grace, skip: SlotDecision("skip", "never merge"))
    assert merge_all(timelines, MergeRules(), SlotMemory(remember=False)).at_ms == []
