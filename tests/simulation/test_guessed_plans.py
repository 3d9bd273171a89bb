"""Whole runs whose plan guessed the speeds of islands wrong: nobody stands still for it, and next to nothing of what is
trained is lost or never counted. The product's learners and syncer in virtual time; no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

import pytest

from diloco_cli.config.settings import RunSettings, SyncSettings, TrainSettings
from diloco_cli.protocol.actors.learner import Learner
from diloco_cli.protocol.log.records import Island
from examples.quality.methods.fleets import PacedFleet
from examples.quality.methods.pacing import Pacing
from tests.simulation.toy import run_of

BATCH, FRAGMENTS, EVERY, STEP_S, LINK_S = 64, 4, 8, 0.5, 0.02
ROUND_S = EVERY * STEP_S
FIRST, TARGET, MOST = 10, 30, 60  # rounds: that a wrong plan may cost something in; whose tokens end a run; of a run


class GuessedRun:
    """One run. `merges`: of rounds FIRST to TARGET; `rounds`: until its end."""

    def __init__(self, planned_s: float, steps_s: tuple[float, ...]) -> None:
        """`planned_s`: of a step of any island; `steps_s`: what it is, of each."""
        settings = RunSettings(
            name="guessed",
            train=TrainSettings(tokens=TARGET * EVERY * BATCH * len(steps_s), batch_tokens=BATCH),
            sync=SyncSettings(every=EVERY, fragments=FRAGMENTS),
        )
        pacings = {f"l{number}": Pacing(step_s, LINK_S, LINK_S) for number, step_s in enumerate(steps_s)}
        islands = [Island(name, "here", BATCH, EVERY, BATCH / planned_s, planned_s) for name in pacings]
        self.fleet = PacedFleet(run_of(settings, islands, elements=1000), pacings)
        early, late = self._merges_until(FIRST), self._merges_until(TARGET)
        self.merges, self.state = late - early, self.fleet.state
        assert self.fleet.world.run(lambda: self.fleet.state.phase == "FINISHED", (MOST - TARGET) * ROUND_S)
        self.rounds, self.state = self.fleet.world.now_s / ROUND_S, self.fleet.state

    def _merges_until(self, rounds: float) -> int:
        world = self.fleet.world
        world.run(lambda: world.now_s >= rounds * ROUND_S, rounds * ROUND_S)
        return self.fleet.state.merges

    def share(self, name: str, doubted: bool = False) -> float:
        """Of what a learner has trained: what counts, or what is doubted."""
        known, num_parameters = self.state.learner(name), self.fleet.run.layout.num_parameters
        return (known.doubted if doubted else known.token_parameters) / num_parameters / self.fleet.tokens[name]


@pytest.fixture
def outgrown(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Fragments whose progress was given up because no offer could hold it, by learner."""
    found, go_back = Counter[str](), Learner._go_back

    def counted(learner: Learner, fragments: Iterable[int], reason: str) -> None:
        lost = list(fragments)
        found[learner.name] += len(lost) if reason == "outgrown" else 0
        go_back(learner, lost, reason)

    monkeypatch.setattr(Learner, "_go_back", counted)
    return found


@cache
def as_planned(learners: int) -> GuessedRun:
    return GuessedRun(STEP_S, (STEP_S,) * learners)


@pytest.mark.parametrize("learners", [1, 3])
@pytest.mark.parametrize(("times", "later_rounds"), [(10.0, 0.5), (20.0, 1.0), (100.0, 7.0)])
def test_a_plan_that_is_many_times_too_slow_costs_no_merges_and_no_steps(
    times: float, later_rounds: float, learners: int, outgrown: Counter[str]
) -> None:
    """Beyond eight times the plan a speed is believed a quarter more a round: until then the run's end moves."""
    right, wrong = as_planned(learners), GuessedRun(STEP_S * times, (STEP_S,) * learners)
    assert wrong.merges == pytest.approx(right.merges, rel=0.1)
    assert wrong.rounds <= right.rounds + later_rounds
    assert not outgrown.total()


@pytest.mark.parametrize("times", [4.0, 20.0])
def test_a_device_much_faster_than_its_plan_and_the_others_loses_nothing_that_it_can_offer(
    times: float, outgrown: Counter[str]
) -> None:
    """It waits while a fragment holds as much as an offer can, and all that it offers is believed. The others lose what
    they do beside equal ones: what they trained while their offers waited for a merge."""
    fast = GuessedRun(STEP_S, (STEP_S, STEP_S / times, STEP_S))
    assert not outgrown.total() and fast.share("l1", doubted=True) == 0
    assert fast.share("l1") > 0.6
    assert fast.share("l0") > 0.95 * as_planned(3).share("l0")
