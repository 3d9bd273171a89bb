"""Mutants in the judging of norms, and in what keeps learners out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from diloco_cli.config.codec import replace
from diloco_cli.protocol.actors.collection import Housekeeper
from diloco_cli.protocol.actors.merging import Candidates, Loader, judged
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commits import Commit, Quarantine
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import Offer
from diloco_cli.protocol.log.state import RunState


class JudgesAlone(Loader):
    """Compares no delta with the others of its slot."""

    def candidates(self, state: RunState, believed: Callable[[Offer], int]) -> Steps[Candidates]:
        found = yield from super().candidates(state, believed)
        alone = [judged(self.run, state, [offer], self.loaded, believed) for offer in found.offers]
        return Candidates(tuple(one for each in alone for one in each.fit))


class NeverClips(Loader):
    """Merges every delta as it is."""

    def candidates(self, state: RunState, believed: Callable[[Offer], int]) -> Steps[Candidates]:
        found = yield from super().candidates(state, believed)
        return Candidates(tuple(replace(one, scale=1.0) for one in found.fit))


class ForgetsAtRestart(Loader):
    """Remembers no norms from before it began to serve, until it has served for some rounds."""

    since: int | None = None

    def candidates(self, state: RunState, believed: Callable[[Offer], int]) -> Steps[Candidates]:
        self.since = state.n if self.since is None else self.since
        young = state.n - self.since < 6 * self.run.num_fragments
        return (yield from super().candidates(structs.replace(state, norms={}) if young else state, believed))


class Forgiving(Housekeeper):
    """Keeps nobody out by itself."""

    def due(self, state: RunState, now_s: float, slot_s: float) -> Commit | None:
        found = super().due(state, now_s, slot_s)
        return None if isinstance(found, Quarantine) else found


class NeverQuarantines(Syncer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.housekeeper = Forgiving(self.run)
