"""The learner as a state machine, on integers and in virtual time: waiting, offering, giving up, saving, leaving."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.errors import FencedError, TerminatedError
from diloco_cli.protocol.actors.learner import PAUSE_S
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat
from diloco_cli.protocol.log.keys import delta_key, heartbeat_key, incarnation_key
from diloco_cli.protocol.log.operations import Create
from diloco_cli.protocol.log.records import MergedOffer, Offer, Outcome, decode
from diloco_cli.protocol.log.state import LearnerState
from diloco_cli.protocol.rules.merging import max_steps
from tests.unit.protocol.integer_ports import STEP_S, UnitTraining, WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import applied, make_run, with_inner

AT_TAU = make_run(adoption="at_tau", overlap=0)
REBASE = make_run(fragments=1, mixing="rebase")
SAVING = with_inner(REBASE, save_every=1)


def took(offer: Offer) -> MergedOffer:
    """This offer, as a merge takes it."""
    return applied(
        offer.learner, offer.seq, incarnation=offer.incarnation, base=offer.base, data_start=offer.data_start,
        data_end=offer.data_end, tokens=offer.tokens, steps=offer.steps,
    )  # fmt: skip


def payload(living: Living, offer: Offer) -> int:
    return int(living.store.get(delta_key(*offer.id, offer.payload_digest)) or b"")


# -- at_tau -----------------------------------------------------------------------------------------------------


def waiting() -> Living:
    """It has offered fragment 0 for slot 0 after two steps, and waits for its merge."""
    living = Living(WrittenLog(AT_TAU))
    living.until(lambda: living.learner.doing == "WAITING")
    living.world.run_for(10.0)
    assert [offer.slot for offer in living.offers()] == [0]
    assert living.training.steps == 2 and living.learner.doing == "WAITING", "neither a merge nor a rollback is there"
    return living


def test_each_merge_is_waited_for_and_adopted_before_the_next_step() -> None:
    living = waiting()
    living.log.merge(50, took(living.offers()[0]))
    living.until(lambda: living.training.steps == 4)
    assert living.seen.adoptions == [(0, 0), (1, 0), (0, 1)]
    assert living.training.values == [48, 96], "two steps on the merged version, four on the other fragment"
    living.until(lambda: len(living.offers()) == 2)
    assert [offer.slot for offer in living.offers()] == [0, 1]


def test_a_merge_that_a_rollback_has_made_void_is_not_waited_for() -> None:
    living = waiting()
    living.log.roll_back(70)
    living.until(lambda: living.training.steps >= 3)
    assert living.seen.adoptions[2:4] == [(0, 1), (1, 1)] and living.seen.back_to == [0]
    assert max(living.training.values) < 70


# -- offers -----------------------------------------------------------------------------------------------------


def test_a_learner_adopts_what_arrives_with_the_progress_that_no_version_holds() -> None:
    """Eight steps: four in its first offer, which 90 holds; four on top of that."""
    living = Living(WrittenLog(REBASE))
    living.until(lambda: living.offers() and living.training.steps == 8)
    first = living.offers()[0]
    assert (payload(living, first), first.steps, first.tokens) == (4, 4, 16)
    living.log.merge(90, took(first))
    living.until(lambda: len(living.offers()) == 2)
    second = living.offers()[1]
    assert (second.base, second.data_start) == (1, first.data_end)
    assert payload(living, second) == second.steps == living.training.steps - 4
    assert living.training.values == [90 - second.steps]


@pytest.mark.parametrize("mixing", ["rebase", "replace"])
def test_what_a_late_offer_held_is_given_up_by_the_adoption_of_the_merge_without_it(mixing: str) -> None:
    """The others have gone the same way already: to go it twice is worse than to lose it. The gap in the data tells."""
    living = Living(WrittenLog(make_run(fragments=1, mixing=mixing)))
    living.until(lambda: living.offers() and living.training.steps == 5)
    living.log.merge(500, applied("l1"))
    living.until(lambda: len(living.offers()) == 2)
    first, second = living.offers()
    assert living.seen.given_up == [(0, "replaced")]
    assert second.base == 1 and second.data_start >= 4 * 5 > first.data_end
    assert payload(living, second) == second.steps == (second.data_end - second.data_start) // 4
    assert living.training.values == [500 - (living.training.steps - second.data_start // 4)]


def test_what_is_due_when_a_late_offers_outcome_is_heard_is_offered_before_anything_is_adopted() -> None:
    """From the base that it has, with what the late one held: it may still be merged, and nothing is given up."""
    living = Living(WrittenLog(REBASE))
    living.until(lambda: living.offers() and living.training.steps == 8)
    living.log.merge(500, applied("l1"))
    living.until(lambda: living.learner.progress.books[0].base.version == 1)
    living.until(lambda: len(living.offers()) == 2)
    first, second = living.offers()
    assert (second.base, second.data_start, second.slot) == (0, first.data_start, 1)
    assert payload(living, second) == second.steps > 8 and living.seen.given_up == []
    assert living.training.values == [500 - living.training.steps]


def test_what_an_offer_for_a_skipped_slot_held_is_in_the_next_one() -> None:
    living = Living(WrittenLog(REBASE))
    living.until(lambda: living.offers() and living.training.steps == 8)
    living.log.append("skip", slot=0)
    living.until(lambda: len(living.offers()) == 2)
    first, second = living.offers()
    assert (second.base, second.data_start, second.data_end) == (0, first.data_start, 4 * second.steps)
    assert payload(living, second) == second.steps >= 8 and living.seen.given_up == []
    assert list(living.learner.fragments.sent[0]) == [second.seq], "what was sent in vain takes no memory"


def test_of_an_offer_that_the_log_has_passed_only_the_record_is_uploaded() -> None:
    """Its number must not be missing."""
    living = Living(WrittenLog(REBASE))
    slow = [30.0]
    living.world.latency_s = lambda actor, operation: (
        slow.pop() if slow and isinstance(operation, Create) and operation.key.startswith("delta/") else 0.001
    )
    living.until(lambda: living.learner.progress.next_seq == 1)
    for slot in range(2):
        living.log.append("skip", slot=slot)
    living.until(lambda: living.learner.progress.next_seq == 2)
    for slot in range(2, 6):
        living.log.append("skip", slot=slot)
    living.until(lambda: len(living.offers()) == 2)
    sent, passed = living.offers()
    assert sent.payload_bytes > 0, "it was on its way before the log passed its slot"
    assert passed.payload_bytes == 0 and passed.slot < 6
    living.until(lambda: len(living.offers()) == 3)
    assert living.offers()[2].payload_bytes > 0


@pytest.mark.parametrize("every", [7, 10, 11, 15])
def test_progress_that_outgrows_an_offer_is_dropped_before_the_next_step_with_news_or_without(every: int) -> None:
    """All its offers come late: the log goes on, and its merges are without this learner. Between two news it steps on
    for several rounds; whatever it offers, it never claims more than an honest learner may."""
    living, most = Living(WrittenLog(REBASE)), max_steps(REBASE)
    for seq in range(8):
        start = 8 * seq
        living.until(lambda until=every * (seq + 1): living.training.steps >= until)
        other = applied("l1", seq, base=living.log.state.n, data_start=start, data_end=start + 8)
        living.log.merge(500 + seq, other)
    living.world.run_for(2.0)
    claimed = [offer.steps for offer in living.offers()]
    assert max(claimed) <= most and "outgrown" in [reason for _, reason in living.seen.given_up]


def test_at_the_drift_bound_everything_is_offered_and_nothing_is_trained() -> None:
    run = make_run(fragments=4, drift_rounds=1)
    living = Living(WrittenLog(run))
    living.until(lambda: living.learner.doing == "WAITING" and not living.learner.progress.aim.delivery.waiting)
    steps = living.training.steps
    living.world.run_for(30.0)
    assert living.training.steps == steps == 4 and "drift bound" in living.learner.note
    assert sorted(offer.fragment for offer in living.offers()) == [0, 1, 2, 3]


def test_a_quarantined_learner_pauses_and_goes_back_to_what_was_adopted_when_it_is_let_in() -> None:
    living = Living(WrittenLog(REBASE))
    living.until(lambda: living.training.steps == 3)
    living.log.append("refuse", outcomes=tuple(Outcome("l0", 1, 100 + n, 0, "bad_norms") for n in range(8)))
    living.log.append("quarantine", learner="l0")
    living.until(lambda: living.learner.doing == "WAITING")
    living.world.run_for(1.0)
    steps, offers = living.training.steps, len(living.offers())
    living.world.run_for(30.0)
    assert (living.training.steps, len(living.offers())) == (
        steps,
        offers,
    ) and "diloco readmit l0" in living.learner.note
    living.log.append("readmit", learner="l0")
    living.until(lambda: living.training.steps == steps + 1)
    assert living.training.values == [99] and living.learner.progress.position == 4 * (steps + 1)


# -- moments ----------------------------------------------------------------------------------------------------


def test_saved_moments_are_named_in_later_offers_and_restored_by_a_successor() -> None:
    log = WrittenLog(SAVING)
    living = Living(log)
    living.until(lambda: living.learner.saves.newest is not None and living.offers())
    log.merge(90, took(living.offers()[0]))
    living.until(lambda: len(living.offers()) == 2)
    assert living.offers()[0].inner is None and living.offers()[1].inner is not None
    successor = Living(log, nonce="b")
    successor.until(lambda: successor.training.steps >= 1)
    assert successor.training.at[0].moments_lost is False
    assert successor.training.moments == 4 + successor.training.steps
    assert successor.offers(2) == [] and successor.learner.progress.position >= living.offers()[1].data_end


@pytest.mark.parametrize(("to", "kept"), [(0, False), (2, False), (3, True)])
def test_a_rollback_while_the_first_versions_are_fetched_decides_whether_saved_moments_count(
    to: int, kept: bool
) -> None:
    """Named by a predecessor's offer, which the newcomer has read by then: as of commit 3, when it joined."""
    log = WrittenLog(SAVING)
    before = Living(log)
    before.until(lambda: before.learner.saves.newest is not None and before.offers())
    version = log.merge(90, took(before.offers()[0]))
    before.until(lambda: len(before.offers()) == 2)
    log.append("refuse")
    log.append("refuse")
    log.hide(version)
    newcomer = Living(log, nonce="b", begins=False)
    newcomer.until(lambda: newcomer.learner.follower.trouble)
    assert (newcomer.learner.joined.inner, newcomer.learner.joined.inner_n) == (before.offers()[1].inner, 3)
    log.append("refuse")
    log.roll_back(70, to=to)
    newcomer.until(lambda: newcomer.seen.begun)
    assert newcomer.learner.saves.newest == (before.offers()[1].inner if kept else None)
    assert newcomer.learner.moments_lost is not kept


@pytest.mark.parametrize(("keeps_moments", "lost"), [(True, True), (False, False)])
def test_moments_that_cannot_be_had_are_lost_where_there_should_be_some(keeps_moments: bool, lost: bool) -> None:
    """Then the learning rate warms up anew, counted from this incarnation's own steps."""
    log = WrittenLog(REBASE)
    log.merge(90, applied("l0"))
    living = Living(log, UnitTraining(1, keeps_moments))
    living.until(lambda: living.training.steps == 2)
    assert [(at.moments_lost, at.own_steps) for at in living.training.at] == [(lost, 0), (lost, 1)]
    assert living.learner.joined.data_start == 8


@pytest.mark.parametrize("to", [0, 2])
def test_after_a_rollback_the_moments_are_those_of_before_or_none(to: int) -> None:
    """Saved once as of commit 1; the run goes back to commit 0, which is before that, or to commit 2."""
    log = WrittenLog(SAVING)
    log.append("refuse")
    living = Living(log)
    living.until(lambda: living.learner.saves.newest is not None)
    kept = living.learner.saves.newest
    log.append("refuse")
    log.append("refuse")
    living.until(lambda: living.learner.state.n == 3)
    log.roll_back(70, to=to)
    living.until(lambda: living.seen.back_to == [to])
    assert living.learner.moments_lost is (to == 0)
    assert living.learner.saves.newest == (kept if to == 2 else None)
    assert living.training.moments == (4 if to == 2 else 0)


def test_moments_that_cannot_be_had_after_a_rollback_are_named_in_no_offer_any_more() -> None:
    log = WrittenLog(SAVING)
    log.append("refuse")
    living = Living(log)
    living.until(lambda: living.learner.saves.newest is not None)
    log.store.delete(living.learner.saves.newest or "")
    log.append("refuse")
    log.append("refuse")
    living.until(lambda: living.learner.state.n == 3)
    log.roll_back(70, to=2)
    living.until(lambda: living.seen.back_to == [2])
    assert living.learner.moments_lost and living.learner.saves.newest is None
    lost_at = living.training.steps
    living.until(lambda: living.training.steps == lost_at + 2)
    assert [at.own_steps for at in living.training.at[lost_at:]] == [0, 1], "the learning rate warms up anew"


# -- leaving ----------------------------------------------------------------------------------------------------


def leaving(**options: Any) -> tuple[Living, list[bool]]:
    """It leaves once the list is not empty."""
    left: list[bool] = []
    living = Living(WrittenLog(make_run(fragments=2)), leaves=lambda: bool(left), **options)
    living.until(lambda: living.training.steps == 3)
    left.append(True)
    return living, left


def test_a_learner_that_may_not_drain_leaves_at_once() -> None:
    living, _ = leaving()
    living.until(lambda: living.actor.ended)
    assert [offer.slot for offer in living.offers()] == [0]


def test_a_learner_that_drains_offers_all_that_it_has_and_stays_until_every_outcome_is_known() -> None:
    living, _ = leaving(may_drain=lambda: True)
    living.until(lambda: len(living.offers()) == 2 and living.learner.doing == "DRAINING")
    living.world.run_for(20.0)
    assert not living.actor.ended
    first, second = living.offers()
    living.log.merge(90, took(first))
    living.world.run_for(20.0)
    assert not living.actor.ended, "one outcome is still to come"
    living.log.merge(80, took(second))
    living.until(lambda: living.actor.ended)
    assert living.training.values[0] > 90, "nothing is adopted any more"


def test_a_drain_ends_with_its_time_or_with_the_run() -> None:
    time: list[int] = []
    living, _ = leaving(may_drain=lambda: not time)
    living.until(lambda: living.learner.doing == "DRAINING")
    time.append(1)
    living.until(lambda: living.actor.ended, 5 * PAUSE_S)
    living, _ = leaving(may_drain=lambda: True)
    living.until(lambda: living.learner.doing == "DRAINING")
    living.log.append("finish")
    living.until(lambda: living.actor.ended)


@pytest.mark.parametrize("kind", ["finish", "stop"])
def test_it_ends_with_the_run(kind: str) -> None:
    living = Living(WrittenLog(REBASE))
    living.until(lambda: living.training.steps == 2)
    living.log.append(kind)
    living.until(lambda: living.actor.ended)
    assert living.actor.result == living.log.state


def test_a_learner_whose_place_is_taken_is_fenced() -> None:
    living = Living(WrittenLog(REBASE))
    living.until(lambda: living.training.steps == 2)
    living.store.create(incarnation_key("l0", 2), b"{}")
    assert living.world.run(lambda: any(actor.error is not None for actor in living.world.actors), 60.0)
    (error,) = [actor.error for actor in living.world.actors if actor.error is not None]
    assert isinstance(error, FencedError)


# -- being seen -------------------------------------------------------------------------------------------------


def test_a_heartbeat_says_what_it_does() -> None:
    living = Living(WrittenLog(make_run(fragments=4, drift_rounds=1)))
    living.world.latency_s = lambda actor, operation: STEP_S / 2 if isinstance(operation, Create) else 0.001
    states = []
    for _ in range(40):
        living.world.run_for(STEP_S / 4)
        states.append(living.learner.follower.heartbeat().state)
    assert set(states) == {"TRAINING", "UPLOADING", "WAITING"} and states[-1] == "WAITING"
    living.world.run_for(10.0)
    heartbeat = decode(LearnerHeartbeat, living.store.get(heartbeat_key("l0")) or b"", "heartbeat")
    assert (heartbeat.state, heartbeat.step, heartbeat.position, heartbeat.loss) == ("WAITING", 4, 16, 1.5)
    assert "drift" in heartbeat.note


@pytest.mark.parametrize(
    ("error", "state"),
    [(FencedError("another"), "FENCED"), (TerminatedError("SIGTERM"), "DONE"), (ValueError("a bug"), "FAILED")],
)
@pytest.mark.parametrize("before", ["STARTING", "RECOVERING", "TRAINING", "WAITING", "DRAINING"])
def test_what_ends_a_learner_is_its_last_state(error: BaseException, state: str, before: str) -> None:
    learner = Living(WrittenLog(make_run()), begins=False).learner
    learner.doing = LearnerState(before)
    learner.ended_by(error)
    assert learner.doing == state
