"""The histories' learner does what the product's does: how it begins, how often it asks, how it leaves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from diloco_cli.protocol.joining import Joined, News
from diloco_cli.protocol.operations import Sleep, Steps
from diloco_cli.protocol.polling import MOST_REQUESTS
from diloco_cli.protocol.records import CommitKind, Output
from diloco_cli.protocol.state import RunState
from diloco_cli.simulate.histories import learner as simulated
from diloco_cli.simulate.histories.learner import Beliefs, Habits, Learner
from diloco_cli.simulate.world import World
from tests.simulation.toy import Fleet, make_run
from tests.unit.protocol.records import follow, genesis
from tests.unit.protocol.records import make_run as recorded_run


@pytest.mark.parametrize("kind", ["finish", "stop"])
def test_it_does_not_outwait_the_run_for_a_version_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, kind: CommitKind
) -> None:
    run = recorded_run()
    before = genesis(run)
    ended = follow(before, kind, run)
    answers = [News(before, missing=before.outputs), News(ended, missing=before.outputs)]

    def joined(*_: Any) -> Steps[Joined]:
        yield Sleep(0.1)
        return Joined(1, before, 0, None)

    def followed(*_: Any) -> Steps[News]:
        yield Sleep(0.1)
        return answers.pop(0)

    monkeypatch.setattr(simulated, "join", joined)
    monkeypatch.setattr(simulated, "follow", followed)
    world, fleet = World(), Fleet(run, World())
    learner = Learner(run, "l0", fleet.claim(), fleet.nonce, Beliefs(), Habits())
    actor = world.start("l0", learner.train())
    assert world.run(lambda: actor.ended, 60.0) and actor.error is None
    assert actor.result == ended and not answers


def test_a_leaver_hears_of_its_offers_and_adopts_nothing_any_more() -> None:
    fleet = Fleet(make_run(learners=2, merges=20))
    left_s: list[float] = []
    adopted: list[tuple[str, float]] = []
    offered: list[float] = []

    def leaves() -> bool:
        if fleet.world.now_s > 0.5 and not left_s:
            left_s.append(fleet.world.now_s)
        return bool(left_s)

    def on_adoption(name: str, _: Output, __: bytes) -> None:
        adopted.append((name, fleet.world.now_s))

    fleet.published.on_adoption = on_adoption
    fleet.published.on_publication = lambda offer_id, _: (
        offered.append(fleet.world.now_s) if offer_id[0] == "l1" else None
    )
    fleet.habits["l1"] = Habits(leaves=leaves)
    fleet.start()
    (leaver,) = fleet.living("l1")
    fleet.finish()
    assert leaver.error is None and leaver.result is not None
    state: RunState = leaver.result
    assert state.phase == "RUNNING" and state.merges > 2
    assert max(offered) > left_s[0], "what no offer held yet"
    assert [at_s for name, at_s in adopted if name == "l1" and at_s > left_s[0]] == []
    mine = [offer_id for offer_id in fleet.published.offers if offer_id[0] == "l1"]
    assert mine and all(state.learner("l1").has_fate(seq) for _, _, seq in mine)


def looks(step_s: float, seconds: float, news: Callable[[int], bool] = lambda look: False) -> list[float]:
    """When it looks at the log, where nothing (or `news`) comes. One fragment of two steps."""
    fleet = Fleet(make_run(learners=1, fragments=1))
    world, found = World(), list[float]()

    class Looking(Learner):
        def _follow_once(self) -> Steps[bool]:
            yield Sleep(0.001)
            found.append(world.now_s)
            return news(len(found))

    learner = Looking(fleet.run, "l0", fleet.claim(), fleet.nonce, Beliefs(), Habits(step_s))
    learner.state = genesis(fleet.run)
    learner.progress = simulated.Progress(fleet.run, "l0", 1, learner.state, 0)
    world.start("l0/1", learner.follow())
    world.run_for(seconds)
    return found


def test_in_long_slots_it_asks_as_the_product_does() -> None:
    """Seldom until the next commit is nearly due, then often: ten seconds a slot."""
    at_s = looks(5.0, 11.0, lambda look: look == 1)
    assert at_s[1] - at_s[0] < 0.1, "what comes may not come alone"
    assert 8.5 < at_s[2] < 9.0 and all(8.5 < look < 11.0 for look in at_s[2:])
    assert 3 <= len(at_s) - 2 <= MOST_REQUESTS


def test_in_short_slots_it_asks_all_the_time_but_seldom() -> None:
    at_s = looks(0.5, 10.0, lambda look: look == 1)
    pauses = [later - look for look, later in pairwise(at_s[1:])]
    assert min(pauses) > 0.15 and max(pauses) < 0.25
