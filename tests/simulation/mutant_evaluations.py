"""Mutants in what follows a loss that has jumped."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from diloco_cli.protocol.actors.syncer import Evaluations, Syncer
from diloco_cli.protocol.log.commit_log import Pulse
from diloco_cli.protocol.log.commits import Commit, Evaluation
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.state import RunState


def with_evaluations(evaluations: type[Evaluations]) -> type[Syncer]:
    class Mutated(Syncer):
        def __init__(self, run: Any, claim: Any, arithmetic: Any, evaluator: Any, *rest: Any, **options: Any) -> None:
            super().__init__(run, claim, arithmetic, evaluator, *rest, **options)
            self.evaluations = evaluations(run, evaluator)

    return Mutated


class RollsBackForEver(Evaluations):
    """Goes back at every jump, however often."""

    def due(self, state: RunState, epoch: int, pulse: Pulse) -> Steps[Commit | None]:
        known = structs.replace(state.stability, recovers_beyond=None)
        return (yield from super().due(structs.replace(state, stability=known), epoch, pulse))


class Jumpy(Evaluations):
    """Takes each loss that is above the one before for a jump."""

    def _evaluation(self, state: RunState, n: int, loss: float | None) -> Evaluation | None:
        found = super()._evaluation(state, n, loss)
        good = state.stability.good
        if found is None or found.loss is None or not good or found.loss <= (good[-1].loss or 0.0) * 0.95:
            return found
        return structs.replace(found, jumped=True, reason="it does not fall any more")
