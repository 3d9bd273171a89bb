"""Each invariant and each demand of the simulation can fail: for each an actor that breaks it.

Those that a planted mutant breaks (1 to 10, 12) are in test_mutants.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.protocol.actors.follower import Follower
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.keys import SYNCER, heartbeat_key
from diloco_cli.protocol.log.operations import Delete, Put, Sleep, Steps
from diloco_cli.protocol.log.state import RunState
from tests.histories.campaign import lived, swept_options
from tests.histories.history import History
from tests.histories.learner import SimulatedLearner
from tests.histories.options import drawn_options
from tests.histories.outcome import Actors
from tests.histories.replayer import Replayer, ViolationError
from tests.histories.script import Script
from tests.simulation.mutant_logs import Mute, with_inbox

SEEDS = 40
MUMBLING = Actors(syncer=with_inbox(Mute))


class Boastful(SimulatedLearner):
    """Steps, and counts the step only: its delta is not what its range gives."""

    def step(self) -> Steps[None]:
        before = list(self.training.values)
        yield from super().step()
        self.training.values = before


class Trespassing(SimulatedLearner):
    """Speaks in the syncer's name."""

    def step(self) -> Steps[None]:
        yield Put(heartbeat_key(SYNCER), b"{}")
        yield from super().step()


class Ravaging(SimulatedLearner):
    """Deletes what is not its own."""

    def step(self) -> Steps[None]:
        yield Delete("weights/0000/")
        yield from super().step()


class Idle(Syncer):
    """Never decides on a slot, and says nothing."""

    def _slot(self, now_s: float) -> Steps[bool]:
        yield from ()
        return False


class Restless(Follower):
    """Asks again and again, without a pause."""

    def follow(self) -> Steps[None]:
        while True:
            yield from self.look()


class Hasty(SimulatedLearner):
    follower_type = Restless


class Staying(SimulatedLearner):
    """Does not leave when the run is over."""

    def train(self) -> Steps[RunState]:
        yield from super().train()
        while True:
            yield Sleep(1.0)


class Lazy(SimulatedLearner):
    """Is there, and offers nothing."""

    def step(self) -> Steps[None]:
        yield Sleep(1.0)


class Crashing(Syncer):
    """Has a bug."""

    def _slot(self, now_s: float) -> Steps[bool]:
        if self.state.slot == 3:
            raise KeyError("a bug")
        return (yield from super()._slot(now_s))


@pytest.mark.parametrize(
    ("actors", "invariant", "says"),
    [
        (Actors(learner=Boastful), "4", "not made from the range"),
        (Actors(learner=Trespassing), "11", "wrote heartbeat/syncer.json"),
        (Actors(learner=Ravaging), "11", "deleted weights/0000/"),
        (MUMBLING, "liveness", "has no outcome"),
        (Actors(syncer=Idle), "liveness", "gives no reason"),
        (Actors(learner=Lazy), "liveness", "no merge for"),
        (Actors(learner=Hasty), "liveness", "spins"),
        (Actors(learner=Staying), "liveness", "do not leave"),
        (Actors(syncer=Crashing), "exit", "KeyError"),
    ],
    ids=[
        "boastful", "trespassing", "ravaging", "mumbling", "idle", "lazy", "hasty", "staying",
        "crashing",
    ],
)  # fmt: skip
def test_it_can_fail(actors: Actors, invariant: str, says: str) -> None:
    for seed in range(SEEDS):
        options = drawn_options(seed)
        if actors is MUMBLING and not (options.learners > 2 and options.quorum == 1):
            continue  # where others keep the log growing
        if actors.learner is Staying and {"stop", "stand_in"} & set(options.nemesis_events):
            continue  # it does not leave a run that was stopped, and is not there when that goes on
        violation = lived(seed, options, actors).violation
        if actors is MUMBLING and violation is not None and violation.invariant == "4":
            continue  # the run was over before the others' merges were enough
        if violation is not None:
            assert (violation.invariant, says in violation.text) == (invariant, True), violation
            return
    pytest.fail("nobody noticed")


def test_the_bucket_is_what_decides_not_the_memory_of_the_checks() -> None:
    """The last replay reads only the bucket: what is changed there afterwards shows."""
    history = History(2, replace(swept_options(2), kept_rounds=64), Script())
    assert history.live().violation is None
    key = sorted(key for key in history.bucket.objects if key.startswith("state/"))[-1]
    history.bucket.objects[key] = b"state:1:1"
    with pytest.raises(ViolationError, match="invariant 9"):
        Replayer(history.bucket, history.run).read()
