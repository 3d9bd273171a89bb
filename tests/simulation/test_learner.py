"""The product's learner in a simulated fleet, on integers: how all leave together."""

from __future__ import annotations

from tests.histories.learner import DRAIN_S, LearnerProfile
from tests.simulation.toy import STEP_S, ToyFleet, make_run


def test_where_all_of_a_quorum_leave_together_they_stay_for_some_seconds_at_most() -> None:
    """Each waits for merges that need the other's next offer."""
    fleet = ToyFleet(make_run(learners=2, merges=40, quorum=2))
    for name in ("l0", "l1"):
        fleet.profile[name] = LearnerProfile(STEP_S, leaves=lambda: fleet.world.now_s >= 0.53)
    fleet.start()
    leavers = fleet.living("l0") + fleet.living("l1")
    assert fleet.world.run(lambda: all(actor.ended for actor in leavers), 0.53 + 2 * DRAIN_S)
    assert [actor.error for actor in leavers] == [None, None]
