"""The product's learner in a simulated fleet, on integers: how it leaves, alone and with all the others."""

from __future__ import annotations

from diloco_cli.histories.learner import DRAIN_S
from diloco_cli.histories.ports import LearnerProfile
from diloco_cli.protocol.log.records import FragmentVersion
from diloco_cli.protocol.log.state import RunState
from tests.simulation.toy import STEP_S, Fleet, make_run


def leaving(fleet: Fleet, at_s: float) -> tuple[LearnerProfile, list[float]]:
    """It leaves before its next step from then on; and when that was."""
    left_s: list[float] = []

    def leaves() -> bool:
        if fleet.world.now_s >= at_s and not left_s:
            left_s.append(fleet.world.now_s)
        return bool(left_s)

    return LearnerProfile(STEP_S, leaves=leaves), left_s


def test_a_leaver_hears_of_its_offers_and_adopts_nothing_any_more() -> None:
    fleet = Fleet(make_run(learners=2, merges=20))
    adopted_s: list[float] = []
    offered_s: list[float] = []

    def on_adoption(name: str, _: FragmentVersion, __: bytes) -> None:
        adopted_s.extend([fleet.world.now_s] if name == "l1" else [])

    fleet.published.on_adoption = on_adoption
    fleet.published.on_publication = lambda offer_id, _: (
        offered_s.append(fleet.world.now_s) if offer_id[0] == "l1" else None
    )
    fleet.profile["l1"], left_s = leaving(fleet, at_s=0.53)
    fleet.start()
    (leaver,) = fleet.living("l1")
    fleet.finish()
    assert leaver.error is None and leaver.result is not None
    state: RunState = leaver.result
    assert state.phase == "RUNNING" and state.merges > 2
    assert max(offered_s) > left_s[0], "what no offer held yet"
    assert adopted_s and max(adopted_s) <= left_s[0]
    mine = [offer_id for offer_id in fleet.published.offers if offer_id[0] == "l1"]
    assert mine and all(state.learner("l1").has_outcome(seq) for _, _, seq in mine)


def test_where_all_of_a_quorum_leave_together_they_stay_for_some_seconds_at_most() -> None:
    """Each waits for merges that need the other's next offer."""
    fleet = Fleet(make_run(learners=2, merges=40, quorum=2))
    for name in ("l0", "l1"):
        fleet.profile[name], _ = leaving(fleet, at_s=0.53)
    fleet.start()
    leavers = fleet.living("l0") + fleet.living("l1")
    assert fleet.world.run(lambda: all(actor.ended for actor in leavers), 0.53 + 2 * DRAIN_S)
    assert [actor.error for actor in leavers] == [None, None]
