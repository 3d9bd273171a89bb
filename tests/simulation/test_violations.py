"""What is demanded while no faults strike shows what it is meant for; and whatever breaks a history is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commits import Skip
from diloco_cli.protocol.log.operations import Sleep, Steps
from tests.histories.campaign import (
    lived,
)
from tests.histories.learner import SimulatedLearner
from tests.histories.options import Options, drawn_options
from tests.histories.script import Actors

MAX_FITTING = 80
WITHIN_SEEDS = 1000


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


def test_a_run_that_only_skips_is_noticed() -> None:
    options = replace(drawn_options(3), learners=2, quorum=1, apart=0, nemesis_events=(), calls=(), faulty_share=0.4)
    violation = lived(3, options, Actors(syncer=SkipsForEver)).violation
    assert violation is not None and violation.invariant == "liveness" and "no merge for" in violation.text
