"""Mutants in the judging of norms, and in what follows from it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from msgspec import structs

from diloco_cli.config.codec import replace
from diloco_cli.protocol.actors.candidates import Candidates, Loader, judged
from diloco_cli.protocol.actors.collection import Housekeeper
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.norms import NOTHING
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules import norms as rules
from diloco_cli.protocol.rules.eligibility import offered_weight


class JudgesAlone(Loader):
    """Compares no delta with the others of its slot."""

    def candidates(self, state: RunState) -> Steps[Candidates]:
        offers = yield from self.load(state)
        self.loaded = {offer.id: self.loaded[offer.id] for offer in offers}
        alone = [judged(self.run, state, [offer], self.loaded) for offer in offers]
        fit = tuple(one for found in alone for one in found.fit)
        return Candidates(tuple(offers), fit, tuple(one for found in alone for one in found.refused))


class NeverClips(Loader):
    """Merges what is not refused as it is."""

    def candidates(self, state: RunState) -> Steps[Candidates]:
        settings = self.run.settings
        run = replace(self.run, settings=replace(settings, sync=replace(settings.sync, clip="none")))
        offers = yield from self.load(state)
        self.loaded = {offer.id: self.loaded[offer.id] for offer in offers}
        return judged(run, state, offers, self.loaded)


class LearnsDirectionsLate(Loader):
    """Lets a delta that flips weigh as much as others in its own merge."""

    def compared(self, state: RunState, found: Candidates) -> Candidates:
        return replace(super().compared(state, found), fit=found.fit)


class IgnoresDirections(LearnsDirectionsLate):
    """Lets a learner weigh as much as ever that keeps pointing against the others."""

    def candidates(self, state: RunState) -> Steps[Candidates]:
        return (yield from super().candidates(structs.replace(state, opposition={})))


class WeighsHonestOnesLess(Loader):
    """Takes what is not twice as long as the others' for empty."""

    def candidates(self, state: RunState) -> Steps[Candidates]:
        found = yield from super().candidates(state)
        with patch.object(rules, "FULL", 2.0):
            return judged(self.run, state, found.offers, self.loaded)


class WeighsTheEmpty(Loader):
    """Lets a delta that holds next to nothing weigh as much as others."""

    def candidates(self, state: RunState) -> Steps[Candidates]:
        found = yield from super().candidates(state)
        run = state.with_members(self.run)
        offers = [one.offer for one in found.fit]
        full = [offered_weight(run, offer.learner, offer.tokens, offer.steps) for offer in offers]
        fit = tuple(replace(one, weight=weight) for one, weight in zip(found.fit, full, strict=True))
        return replace(found, fit=fit)


class ForgetsAtRestart(Loader):
    """Remembers no norms from before it began to serve, until it has served for some rounds."""

    since: int | None = None

    def candidates(self, state: RunState) -> Steps[Candidates]:
        self.since = state.n if self.since is None else self.since
        young = state.n - self.since < 6 * self.run.num_fragments
        return (yield from super().candidates(structs.replace(state, norms={}) if young else state))


class ResetByOne(Loader):
    """Takes its memory to be out of date as soon as one learner was refused in two rounds."""

    def candidates(self, state: RunState) -> Steps[Candidates]:
        norms = {
            fragment: NOTHING if any(one.last > one.first for one in known.refused.values()) else known
            for fragment, known in state.norms.items()
        }
        return (yield from super().candidates(structs.replace(state, norms=norms)))


class Forgiving(Housekeeper):
    """Lets each merged offer take a whole fault back."""

    def due(self, state: RunState, now_s: float, slot_s: float) -> Commit | None:
        learners = {
            name: structs.replace(known, faults=min(known.faults, float(max(0, known.refused - known.merges))))
            for name, known in state.learners.items()
        }
        return super().due(structs.replace(state, learners=learners), now_s, slot_s)


class PaysBackWhole(Syncer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.housekeeper = Forgiving(self.run)
