"""`at_tau`: how long a learner waits for the merge of an own offer; the product's loop, and the simulated island's."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_cli.learner import loop
from diloco_cli.learner.loop import Facts, Trainer
from diloco_cli.protocol.progress import Draft, Progress
from diloco_cli.protocol.records import Output, Rollback, RunFormat
from diloco_cli.protocol.state import RunState
from diloco_cli.simulate.island import Condition, Incarnation, Sizes
from diloco_cli.simulate.world import World
from tests.unit.protocol.records import applied, follow, genesis, make_run, merge

RUN = make_run(adoption="at_tau", overlap=0)
BEFORE = genesis(RUN)
MERGED = merge(BEFORE, applied(), run=RUN)
BACK = follow(
    BEFORE, "rollback", RUN, rollback=Rollback(0),
    outputs=tuple(replace(output, version=1) for output in BEFORE.outputs),
)  # fmt: skip


def offered() -> tuple[Progress, Draft]:
    """A learner that has offered fragment 0 for slot 0, and so waits at slot 1."""
    progress, drafts = Progress(RUN, "l0", 1, BEFORE, 0), list[Draft]()
    while not drafts:
        progress.stepped()
        drafts = progress.due()
    assert drafts[0].slot == 0 and progress.next_slot == 1
    return progress, drafts[0]


class Exchanging:
    """As much of an exchange as waiting needs: nothing new at first, then the log as it is, and its versions."""

    def __init__(self, later: RunState) -> None:
        self.state, self.later, self.asked, self.adoptions = BEFORE, later, 0, list[Output]()
        self.timings = SimpleNamespace(step_s=0.1, upload_s=0.0, adoption_s=0.0)
        self.moments = SimpleNamespace(newest=None, forget=lambda: None)
        self.news = Event()
        self.news.set()

    def arrivals(self) -> tuple[list[Any], RunState]:
        self.asked += 1
        self.news.set()
        assert self.asked < 5, "waits for what never comes"
        if self.asked < 2:
            return [], BEFORE
        self.state = self.later
        news = [output for output in self.later.outputs if output.version > 0 and self.asked == 2]
        return [SimpleNamespace(output=output, values=None) for output in news], self.later


@pytest.mark.parametrize(("later", "adopts"), [(MERGED, [(0, 1)]), (BACK, [(0, 1), (1, 1)])])
def test_the_product_waits_for_the_merge_and_for_nothing_after_a_rollback(
    monkeypatch: pytest.MonkeyPatch, later: RunState, adopts: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(Trainer, "leave_behind", lambda trainer, state: trainer.held_back.clear())
    monkeypatch.setattr(Trainer, "adopt", lambda trainer, arrival, state=None: taken(trainer, arrival.output))
    monkeypatch.setattr(loop, "say", lambda text: None)

    def taken(trainer: Any, output: Output) -> None:
        trainer.exchange.adoptions.append((output.fragment, output.version))
        trainer.progress.adopted(output)

    progress, draft = offered()
    exchange: Any = Exchanging(later)
    replica: Any = SimpleNamespace(tensors={})
    trainer = Trainer(RUN, progress, exchange, replica, lambda: False, Facts())
    trainer.awaited.append(draft)
    trainer.await_merges()
    assert exchange.adoptions == adopts and not trainer.awaited and trainer.facts.state == "TRAINING"


@pytest.mark.parametrize("later", [MERGED, BACK])
def test_so_does_the_simulated_island(later: RunState) -> None:
    world = World()
    island = _incarnation(RUN, world)
    island.progress, draft = offered()
    island.awaited.append(draft)
    waiting = world.start("l0", island._await_merges())
    world.run_for(2.0)
    assert not waiting.ended, "neither the merge is there nor a rollback"
    island.state = later
    island.arrived = {output.fragment: output for output in later.outputs if output.version > 0}
    world.run_for(1.0)
    assert waiting.ended and waiting.error is None and not island.arrived
    assert [book.base.version for book in island.progress.books] == [o.version for o in later.outputs]


def _incarnation(run: RunFormat, world: World) -> Any:
    condition = Condition(run.islands[0])
    claim: Any = None
    made = Incarnation(run, condition, Sizes((1.0, 1.0), (1.0, 1.0), 0.0), claim, str, world)
    made.state, made.joined_at = BEFORE, 0
    return made
