"""Mutants in collecting garbage, each as a mutated syncer."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from diloco_cli.protocol.actors.collection import Collector, Sweep
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commit_log import state_after
from diloco_cli.protocol.log.commits import CollectionFloor, Commit
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.snapshots import snapshots_between
from diloco_cli.protocol.log.state import RunState


def with_collector(collector: type[Collector]) -> type[Syncer]:
    """A syncer that collects garbage so."""

    class MutantCollector(Syncer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.housekeeper.collector = collector(self.run)

    return MutantCollector


class HastyCollector(Collector):
    """Deletes behind the head as it knows it, with no floor in the log."""

    def is_done(self, state: RunState) -> bool:
        return state.n < 4

    def look(self, state: RunState, now_s: float) -> None:
        if self.sweep is None or self.sweep.is_done:
            self.floor, self.sweep = state.n, None


class RudeCollector(Collector):
    """Deletes behind a floor as soon as it is in the log, and leaves readers no time to hear of it."""

    def look(self, state: RunState, now_s: float) -> None:
        super().look(state, now_s)
        self.starts_s = now_s


class FloorAtTheNewestSnapshot(Syncer):
    """Leaves one snapshot, and none for the day on which that is damaged."""

    def _commit(self, draft: Commit) -> Steps[bool]:
        if isinstance(draft, CollectionFloor):
            draft = replace(draft, floor=(yield from snapshots_between(0, self.state.n))[-1])
        return (yield from super()._commit(draft))


class FloorAtTheHead(Syncer):
    """Commits a floor from which nobody can replay."""

    def _commit(self, draft: Commit) -> Steps[bool]:
        if isinstance(draft, CollectionFloor):
            draft = replace(draft, floor=self.state.n - 1)
        return (yield from super()._commit(draft))


class EveryMoment(Sweep):
    """Finds that no saved moments are needed."""

    def _older_moments(self, keys: list[str]) -> list[str]:
        return keys


class ForgetfulCollector(Collector):
    """Deletes behind the floor, and learners' saved states with it, the newest included."""

    def work(self, state: RunState, now_s: float, budget_s: float) -> Steps[bool]:
        if self.sweep is None and now_s >= self.starts_s and not self.is_done(state):
            self.sweep = EveryMoment((yield from state_after(self.run, self.floor, state.revoked)))
        return (yield from super().work(state, now_s, budget_s))
