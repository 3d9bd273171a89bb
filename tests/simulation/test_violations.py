"""What is demanded while no faults strike shows what it is meant for; and whatever breaks a history is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.errors import DataCheckError, UsageError
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commits import Skip
from diloco_cli.protocol.log.operations import Sleep, Steps
from tests.histories import campaign as campaigns
from tests.histories.campaign import (
    AGAIN_EVERY,
    MAX_VIOLATIONS,
    campaign,
    lived,
    point_at,
    swarm,
    sweep,
    sweep_points,
    swept_options,
    work_of,
)
from tests.histories.history import History
from tests.histories.learner import SimulatedLearner
from tests.histories.options import PIECE_SIZES, Options, drawn_options
from tests.histories.outcome import Actors, HistoryResult
from tests.histories.replayer import Plain, Replayer, ViolationError

MAX_FITTING = 80
WITHIN_SEEDS = 1000
TAUGHT_OTHERWISE = "only where nothing is remembered"


class LazyAfterARestart(SimulatedLearner):
    """One of the learners is there again, and offers nothing."""

    def step(self) -> Steps[None]:
        if self.name == "l1" and self.progress.incarnation > 1:
            yield Sleep(1.0)
        else:
            yield from super().step()


class FailsAfterARestart(SimulatedLearner):
    """One of the learners ends with an error whenever it is brought back."""

    def step(self) -> Steps[None]:
        if self.name == "l1" and self.progress.incarnation > 1:
            raise DataCheckError("its disk is broken")
        yield from super().step()


class SkipsForEver(Syncer):
    """Passes over slot after slot as soon as nothing is in the way of merging."""

    def _slot(self, now_s: float) -> Steps[bool]:
        if self.state.slot >= 3:
            return (yield from self._commit(Skip(slot=self.state.slot, reason="no quorum")))
        return (yield from super()._slot(now_s))


def others_go_on(options: Options) -> bool:
    """Without l1, which may come back."""
    return options.learners > 1 and options.quorum == 1 and bool({"kill", "kill_all"} & set(options.nemesis_events))


@pytest.mark.parametrize(
    ("learner", "invariant", "says"),
    [(LazyAfterARestart, "liveness", "offers nothing for"), (FailsAfterARestart, "exit", "its disk is broken")],
)
def test_a_learner_that_comes_back_and_does_no_work_is_noticed(
    learner: type[SimulatedLearner], invariant: str, says: str
) -> None:
    fitting = [seed for seed in range(WITHIN_SEEDS) if others_go_on(drawn_options(seed))][:MAX_FITTING]
    for seed in fitting:
        violation = lived(seed, drawn_options(seed), Actors(learner=learner)).violation
        if violation is not None:
            assert violation.invariant == invariant and says in violation.text and "l1." in violation.text
            return
    pytest.fail(f"{len(fitting)} histories, and nobody noticed")


# -- the second life ----------------------------------------------------------------------------------------------


def breaks_where_nothing_is_remembered(self: History, outcome: HistoryResult | None = None) -> None:
    if not self.remembers:
        raise ViolationError("10", TAUGHT_OTHERWISE)


def test_what_only_the_second_life_breaks_is_told_with_its_shortest_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "_check_at_the_end", breaks_where_nothing_is_remembered)
    assert not swarm(range(AGAIN_EVERY + 1, AGAIN_EVERY + 3)).violations
    (violation,) = swarm(range(AGAIN_EVERY, AGAIN_EVERY + 1)).violations
    assert violation.invariant == "10" and TAUGHT_OTHERWISE in violation.story[-1]
    assert violation.story[1] == "no fault is needed:"


def test_a_log_that_wall_clocks_change_is_told_with_its_shortest_story(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = History.live

    def live(self: History) -> HistoryResult:
        outcome = usual(self)
        if self.walls:
            outcome.log.pop()
        return outcome

    monkeypatch.setattr(History, "live", live)
    seeds = range(AGAIN_EVERY, 20 * AGAIN_EVERY, AGAIN_EVERY)
    seed = next(seed for seed in seeds if drawn_options(seed).piece_bytes not in PIECE_SIZES)
    (violation,) = swarm(range(seed, seed + 1)).violations
    assert violation.invariant == "12" and violation.story[1] == "no fault is needed:"


# -- broken off ---------------------------------------------------------------------------------------------------


def break_at_commit_4(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    usual = Replayer.feed

    def feed(self: Replayer, data: bytes) -> Plain:
        if self.n == 4:
            raise error
        return usual(self, data)

    monkeypatch.setattr(Replayer, "feed", feed)


def test_a_mistake_of_the_checks_does_not_end_a_campaign_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    break_at_commit_4(monkeypatch, KeyError("weight"))
    lines: list[str] = []
    totals = swarm(range(7, 8), lines.append)
    (violation,) = totals.violations
    assert (totals.histories, violation.seed, violation.invariant) == (1, 7, "exit")
    assert violation.story[-1] == "invariant exit: the history itself ended with KeyError: 'weight'"
    assert any("test_violations.py" in line and "feed" in line for line in violation.story)
    assert len(lines) == 1 and lines[0].startswith("seed 7: invariant exit"), "told before its story was looked for"


# -- sweeps -------------------------------------------------------------------------------------------------------


def test_a_sweep_whose_history_breaks_an_invariant_without_a_crash_is_one_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_at_commit_4(monkeypatch, ViolationError("3", "planted"))
    assert sweep_points(2) == []
    totals = campaign(work_of(2, 1, True), 1, lambda totals: None)
    (violation,) = totals.violations
    assert (totals.histories, totals.next_seed, violation.invariant) == (1, 3, "3")


def test_a_sweep_that_has_found_enough_has_not_done_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "violation_of", lambda seed, *others: (seed, others[2]))
    monkeypatch.setattr(History, "_live", lambda self: (_ for _ in ()).throw(ViolationError("3", "planted")))
    few, many = ([None] * number for number in (MAX_VIOLATIONS - 1, MAX_VIOLATIONS + 1))
    assert sweep(2, few, last=True).next_seed == 3 and sweep(2, few, last=False).next_seed == 2
    assert sweep(2, many, last=True).next_seed == 2


def test_a_violation_of_a_sweep_is_repeated_by_its_crash_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = History._check_at_the_end

    def broken_by_a_crash(self: History) -> None:
        usual(self)
        if self.supervisor.crashes:
            raise ViolationError("3", "planted")

    monkeypatch.setattr(History, "_check_at_the_end", broken_by_a_crash)
    point = sweep_points(2)[7]
    (violation,) = sweep(2, [point]).violations
    words, _, at = violation.command.partition(" --at ")
    assert words == "python -m tests.histories --sweep --seed 2" and point_at(at) == point
    again = campaign(work_of(2, 1, True, only=point_at(at)), 1, lambda totals: None)
    assert again.violations == [violation] and again.histories == 1
    with pytest.raises(UsageError, match="no operation of a sweep"):
        point_at("l0.1:3:during")


def test_a_sweeps_learners_that_live_apart_are_no_more_than_its_learners() -> None:
    drawn = [(drawn_options(seed), swept_options(seed)) for seed in range(WITHIN_SEEDS)]
    assert any(options.apart > swept.learners for options, swept in drawn)
    assert all(swept.apart <= swept.learners for _, swept in drawn)


# -- merges -------------------------------------------------------------------------------------------------------


def test_a_run_that_only_skips_is_noticed() -> None:
    options = replace(drawn_options(3), learners=2, quorum=1, apart=0, nemesis_events=(), calls=(), faulty_share=0.4)
    violation = lived(3, options, Actors(syncer=SkipsForEver)).violation
    assert violation is not None and violation.invariant == "liveness" and "no merge for" in violation.text
