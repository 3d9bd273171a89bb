"""Mutants in collecting garbage, each as a mutated syncer."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from diloco_cli.protocol.actors.collection import Collector, Sweep, sweep_behind
from diloco_cli.protocol.actors.inbox import Inbox, Mailbox
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commits import CollectionFloor, Commit
from diloco_cli.protocol.log.keys import offer_key, read_delta_key, read_offer_key
from diloco_cli.protocol.log.operations import Get, Steps
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, Offer, decode
from diloco_cli.protocol.log.state import RunState

OLDEST = 40  # offers of a mailbox, the newest, that a mutant looks back at


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
        self.grace_s = 0.0
        super().look(state, now_s)


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


class EverySnapshot(Sweep):
    """Takes all snapshots behind the floor for garbage, as that is a state of its own."""

    def __init__(self, floor: RunState, snapshot: int = 0) -> None:
        super().__init__(floor, floor.n)


class Undecided(Sweep):
    """Takes every delta of the floor's incarnations for garbage, also one that a coming merge has read ahead."""

    def is_garbage(self, key: str, epoch: int) -> bool:
        delta = read_delta_key(key)
        return super().is_garbage(key, epoch) or (
            delta is not None and delta[1] <= self.floor.learner(delta[0]).floor and key.startswith("delta/")
        )


class EveryOffer(Sweep):
    """Takes each offer with an outcome for garbage, also the last one, at which a restarted learner begins to read."""

    def is_garbage(self, key: str, epoch: int) -> bool:
        offer = read_offer_key(key)
        return super().is_garbage(key, epoch) or (
            offer is not None
            and offer[1] == self.floor.learner(offer[0]).floor
            and self.floor.learner(offer[0]).has_outcome(offer[2])
        )


def sweeping(kind: type[Sweep]) -> type[Collector]:
    """A collector with such sweeps."""

    class MutantSweeps(Collector):
        def work(self, state: RunState, now_s: float, budget_s: float) -> Steps[bool]:
            if self.sweep is None and self.floor > 0:
                self.sweep = yield from sweep_behind(self.run, self.floor, state.revoked, kind)
            return (yield from super().work(state, now_s, budget_s))

    return MutantSweeps


class TakesLateForNew(Inbox):
    """Takes an offer that is created behind the floor for new: its number was free, since the sweep."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.free: set[str] = set()

    def _fetch_portion(
        self, box: Mailbox, state: RunState, now_s: float, slot_s: float, members: list[Steps[Any]] | None
    ) -> Steps[bool]:
        for seq in range(max(0, box.next_seq - OLDEST), box.next_seq):
            key = offer_key(box.learner, box.incarnation, seq)
            data = yield Get(key, MAX_RECORD_BYTES)
            if data is None:
                self.free.add(key)
            elif key in self.free:
                self.free.remove(key)
                self.refuse(decode(Offer, data, key), "late")
        return (yield from super()._fetch_portion(box, state, now_s, slot_s, members))
