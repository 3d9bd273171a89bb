"""The learner as a state machine, on integers and in virtual time: what it does, follows, keeps and measures."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from diloco_cli.errors import FencedError, TerminatedError
from diloco_cli.protocol.actors.learner import LOOKS_FOR_ROLLBACK, PAUSE_S, Fragments, Moments, Phase, Stopwatch
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, sealed
from diloco_cli.protocol.log.keys import commit_key, delta_key, heartbeat_key, incarnation_key, weights_key
from diloco_cli.protocol.log.operations import Create, Get, Operation
from diloco_cli.protocol.log.records import MergedOffer, Offer, Outcome, Timings, decode
from diloco_cli.protocol.log.state import LearnerState
from diloco_cli.protocol.rules.merging import max_steps
from diloco_cli.protocol.rules.pacing import DENSE_BOUNDS_S, EARLY, MAX_REQUESTS, SHORT_SLOT_S
from diloco_cli.virtual.world import LATENCY_S, Actor
from tests.unit.protocol.integer_ports import STEP_S, UnitTraining, UnitWire, WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import applied, make_run, with_inner, with_steps

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
def test_whatever_a_learner_offers_it_never_claims_more_than_an_offer_can_hold(every: int) -> None:
    """All its offers come late: the log goes on, and its merges are without this learner. Between two news it steps on
    for several rounds, or waits."""
    living, most = Living(WrittenLog(REBASE)), max_steps(REBASE)
    for seq in range(8):
        start = 8 * seq
        living.world.run_for(every * STEP_S)
        other = applied("l1", seq, base=living.log.state.n, data_start=start, data_end=start + 8)
        living.log.merge(500 + seq, other)
    living.world.run_for(2.0)
    claimed = [offer.steps for offer in living.offers()]
    assert 4 < max(claimed) <= most


def test_a_learner_that_is_too_fast_waits_with_all_that_an_offer_can_hold_until_that_is_merged() -> None:
    """The slots of its first fragment are skipped, and the other learner merges the second alone."""
    run = make_run(fragments=2)
    living, most = Living(WrittenLog(run)), max_steps(run)
    for seq in range(8):
        living.world.run_for(6 * STEP_S)
        living.log.append("skip", slot=2 * seq)
        base = living.log.state.outputs[1].version
        living.log.merge(500 + seq, applied("l1", seq, base=base, data_start=8 * seq, data_end=8 * seq + 8))
    living.until(lambda: living.offers()[-1].steps == most)
    assert living.learner.doing == "WAITING" and "too fast" in living.learner.note
    steps = living.training.steps
    living.world.run_for(5.0)
    assert living.training.steps == steps
    living.log.merge(90, took(living.offers()[-1]))
    living.until(lambda: living.training.steps > steps)
    assert "outgrown" not in [reason for _, reason in living.seen.given_up]


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


def test_moments_are_saved_when_those_before_have_arrived() -> None:
    """They are due after steps 4 and 8, and on their way for six steps: none wait for each other in memory."""
    living = Living(WrittenLog(SAVING))
    saved, save = list[int](), living.training.save

    def saves() -> Moments | None:
        saved.append(living.training.steps)
        return save()

    living.training.save = saves  # type: ignore[method-assign]
    living.world.latency_s = lambda actor, operation: (
        6 * STEP_S if isinstance(operation, Create) and operation.key.startswith("inner/") else LATENCY_S
    )
    living.until(lambda: len(saved) == 2)
    assert saved[0] == 4 and 10 <= saved[1] <= 12 and living.learner.uploaded_at == 4


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
    log.store.delete(heartbeat_key("l0"))
    newcomer = Living(log, nonce="b", begins=False)
    newcomer.until(lambda: newcomer.learner.follower.trouble)
    assert newcomer.learner.joined.saves == ((3, before.offers()[1].inner),)
    log.append("refuse")
    log.roll_back(70, to=to)
    newcomer.until(lambda: newcomer.seen.begun)
    assert newcomer.learner.saves.newest == (before.offers()[1].inner if kept else None)
    assert newcomer.learner.moments_lost is not kept


@pytest.mark.parametrize("newest", ["there", "gone", "another's"])
def test_of_moments_that_no_offer_names_the_last_heartbeat_tells(newest: str) -> None:
    """Saved after step 4, named in an offer, and again later. What the heartbeat names may not be had."""
    log = WrittenLog(SAVING)
    before = Living(log)
    before.until(lambda: before.learner.saves.newest is not None and before.offers())
    log.merge(90, took(before.offers()[0]))
    before.until(lambda: before.learner.uploaded_at >= 8 and len(before.offers()) == 2)
    named, unnamed = before.offers()[1].inner, before.learner.saves.newest
    assert named and unnamed and named != unnamed
    step = int(unnamed.rsplit("/")[-1].split("-")[0])
    if newest == "another's":
        unnamed = unnamed.replace("/l0/", "/l1/")
        log.store.create(unnamed, b"%d" % step)
    said = replace(before.learner.follower.heartbeat(), moments=unnamed)
    log.store.put(heartbeat_key("l0"), sealed(log.run.keyring, "l0", heartbeat_key("l0"), said))
    if newest == "gone":
        log.store.delete(unnamed)
    successor = Living(log, nonce="b")
    assert successor.training.moments == (step if newest == "there" else 4) and not successor.learner.moments_lost
    assert successor.learner.saves.newest == (unnamed if newest == "there" else named)


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
    living = Living(WrittenLog(make_run(fragments=2, mixing="rebase")), leaves=lambda: bool(left), **options)
    living.until(lambda: living.training.steps == 3)
    left.append(True)
    return living, left


def test_a_learner_that_may_not_drain_leaves_at_once() -> None:
    living, _ = leaving()
    living.until(lambda: living.actor.ended)
    assert [offer.slot for offer in living.offers()] == [0]


def test_a_learner_that_drains_offers_until_all_that_it_has_is_merged_and_names_what_it_saved_first() -> None:
    """An offer of one fragment is on its way when it is told to leave; the other's is not merged at once."""
    living, _ = leaving(may_drain=lambda: True)
    living.until(lambda: len(living.offers()) == 2 and living.learner.doing == "DRAINING")
    living.world.run_for(20.0)
    assert not living.actor.ended
    (first, second), steps = living.offers(), living.training.steps
    living.log.merge(90, took(first))
    living.until(lambda: len(living.offers()) == 3)
    rest = living.offers()[2]
    assert (rest.fragment, rest.data_start, rest.steps) == (first.fragment, first.data_end, steps - first.steps)
    assert rest.inner == living.learner.saves.newest is not None, "before its first save it has saved"
    living.log.append("skip", slot=second.slot)
    living.until(lambda: len(living.offers()) == 4)
    again = living.offers()[3]
    assert (again.fragment, again.data_start, again.steps) == (second.fragment, second.data_start, steps)
    living.log.merge(80, took(rest))
    living.world.run_for(20.0)
    assert not living.actor.ended, "one outcome is still to come"
    living.log.merge(70, took(again))
    living.until(lambda: living.actor.ended)


def test_a_learner_whose_run_is_stopped_saves_its_moments_and_offers_nothing() -> None:
    living = Living(WrittenLog(REBASE), may_drain=lambda: True)
    living.until(lambda: living.training.steps == 2)
    living.log.append("stop")
    living.until(lambda: living.actor.ended)
    assert living.store.get(living.learner.saves.newest or "") == b"%d" % living.training.steps
    assert living.offers() == []


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


@pytest.mark.parametrize(("kind", "why"), [("finish", ""), ("stop", "the run was stopped")])
def test_it_ends_with_the_run_and_says_why(kind: str, why: str) -> None:
    living = Living(WrittenLog(REBASE))
    living.until(lambda: living.training.steps == 2)
    living.log.append(kind)
    living.until(lambda: living.actor.ended)
    assert living.actor.result == living.log.state and living.learner.note == why
    living.learner.ended_by(TerminatedError("SIGTERM"), "SIGTERM")
    assert living.learner.note == (why or "SIGTERM")


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
    learner.note = "waits for a merge"
    learner.ended_by(error, "why " * 100)
    assert learner.doing == state
    assert learner.note == ("why " * 100 if state == "DONE" else "why " * 75)


RUN = make_run(fragments=2)


def followed() -> Living:
    """A learner that stands still, so that only its follower works."""
    living = Living(WrittenLog(RUN))
    living.world.pause(living.actor)
    return living


def looked(step_s: float, seconds: float) -> tuple[float, list[float]]:
    """When a merge was found, and when the log was looked at from then on. One fragment, four steps a slot."""
    living, looks_s = Living(WrittenLog(with_steps(make_run(fragments=1), step_s))), list[float]()
    living.world.pause(living.actor)
    living.log.merge(90, applied("l1"))
    living.until(lambda: living.learner.follower.state.n == 1)

    def latency_s(actor: Actor, operation: Operation) -> float:
        if isinstance(operation, Get) and operation.key == commit_key(2):
            looks_s.append(living.world.now_s)
        return 0.001

    living.world.latency_s = latency_s
    found_s = living.world.now_s
    living.world.run_for(seconds)
    return found_s, looks_s


def weights_read(living: Living) -> Counter[str]:
    """Which versions are asked for, from now on."""
    read: Counter[str] = Counter()

    def latency_s(actor: Actor, operation: Operation) -> float:
        if isinstance(operation, Get) and operation.key.startswith("weights/"):
            read[operation.key[:25]] += 1
        return 0.001

    living.world.latency_s = latency_s
    return read


# -- when it looks ----------------------------------------------------------------------------------------------


def test_in_long_slots_it_looks_at_once_for_more_and_then_about_when_the_next_commit_is_due() -> None:
    found_s, looks_s = looked(2.5, 11.0)
    after_s = [look_s - found_s for look_s in looks_s]
    assert after_s[0] < 0.1, "what comes may not come alone"
    assert after_s[1] == pytest.approx(10.0 * EARLY, abs=0.5) and 3 <= len(after_s) <= 1 + MAX_REQUESTS


def test_a_merge_is_found_when_it_is_due_though_an_evaluation_came_right_before_it() -> None:
    living = Living(WrittenLog(with_steps(make_run(fragments=1), 2.5)))
    living.world.pause(living.actor)
    living.log.merge(90, applied("l1"))
    living.until(lambda: living.learner.follower.state.n == 1)
    living.world.run_for(8.0)
    living.log.append("eval", evaluated=1, loss=2.0, tokens=8)
    living.until(lambda: living.learner.follower.state.n == 2)
    living.world.run_for(1.0)
    living.log.merge(80, applied("l1", 1, base=1, data_start=8, data_end=16))
    merged_s = living.world.now_s
    living.until(lambda: living.learner.follower.state.n == 3)
    assert living.world.now_s - merged_s < 2.5, "not a slot of 10 s later"


def test_a_merge_that_is_found_late_as_a_version_took_long_to_fetch_makes_it_look_no_later_for_the_next() -> None:
    living = Living(WrittenLog(with_steps(make_run(fragments=1), 2.5)))  # slots of 10 s
    living.world.pause(living.actor)
    first = living.log.merge(90, applied("l1"))
    slow = weights_key(first.fragment, first.version, 1, first.weights_digest)
    living.world.latency_s = lambda actor, operation: (
        19.0 if isinstance(operation, Get) and operation.key == slow else 0.001
    )
    living.until(lambda: living.learner.follower.state.n == 1)
    living.world.run_for(10.0)
    living.log.merge(80, applied("l1", 1, base=1, data_start=8, data_end=16))
    living.until(lambda: living.learner.follower.state.n == 2)
    living.world.run_for(1.0)
    living.log.merge(70, applied("l1", 2, base=2, data_start=16, data_end=24))
    merged_s = living.world.now_s
    living.until(lambda: living.learner.follower.state.n == 3)
    assert living.world.now_s - merged_s < 1.0, "not most of a slot of 10 s later"


def test_in_short_slots_it_looks_all_the_time_and_ever_less_often_when_a_commit_is_late() -> None:
    found_s, looks_s = looked(0.1, 10.0)
    pauses_s = [later_s - look_s for look_s, later_s in pairwise(looks_s)]
    dense_s = [pause_s for look_s, pause_s in zip(looks_s, pauses_s, strict=False) if look_s < found_s + 0.4]
    shortest_s, max_s = DENSE_BOUNDS_S
    assert len(dense_s) > 5 and shortest_s <= min(pauses_s[1:]) and max(dense_s) < max_s + 0.01
    assert len(pauses_s) < 50 and max(pauses_s) < SHORT_SLOT_S + 0.01


def test_while_it_drains_it_looks_every_second_however_long_slots_seem() -> None:
    """There were hiccups in its only steps, and so nothing ever tells otherwise."""
    training = UnitTraining(1)
    run = make_run(fragments=1)
    living = Living(WrittenLog(run), training, leaves=lambda: training.steps == 1, may_drain=lambda: True)
    living.until(lambda: living.learner.doing == "DRAINING" and living.offers())
    for _ in range(2):
        living.learner.watch.took("step", 50.0)
    living.world.run_for(3.0)
    living.log.merge(90, took(living.offers()[0]))
    merged_s = living.world.now_s
    living.until(lambda: living.actor.ended)
    assert living.world.now_s - merged_s < 2.0


# -- news for the training --------------------------------------------------------------------------------------


def test_what_has_arrived_waits_until_it_is_taken_and_only_the_newest_of_each_fragment() -> None:
    living = followed()
    follower = living.learner.follower
    assert follower.take() is None
    for value in (90, 80, 70):
        living.log.merge(value, applied("l1", base=living.log.state.outputs[living.log.state.slot % 2].version))
        living.until(lambda: follower.state.n == living.log.state.n)
        living.world.run_for(1.0)
    mail = follower.take()
    assert mail is not None and mail.state == living.log.state
    assert {fragment: values for fragment, (_, values, _) in mail.versions.items()} == {0: 70, 1: 80}
    assert follower.take() is None


def test_the_log_is_known_before_the_version_that_it_brings_has_arrived() -> None:
    living = followed()
    made = living.log.merge(90, applied("l1"))
    data = living.log.hide(made)
    living.until(lambda: living.learner.follower.state.n == 1)
    living.world.run_for(0.1)
    mail = living.learner.follower.take()
    assert mail is not None and mail.state.n == 1 and mail.versions == {}
    living.log.show(made, data)
    living.world.run_for(1.0)
    later = living.learner.follower.take()
    assert later is not None and later.versions[0][:2] == (made, 90)


# -- versions that cannot be had --------------------------------------------------------------------------------


def test_it_is_in_every_heartbeat_and_told_once_until_its_successor_is_there() -> None:
    living = Living(WrittenLog(RUN))
    made = living.log.merge(90, applied("l1"))
    living.log.hide(made)
    living.until(lambda: living.learner.follower.trouble and living.learner.note)
    living.world.run_for(0.5)
    assert living.learner.follower.heartbeat().note == "version 1 of fragment 0 cannot be read"
    assert living.learner.follower.unreadable == {0}
    living.log.append("skip", slot=1)
    living.log.merge(80, applied("l1", 1, base=1, data_start=8, data_end=16))
    living.until(lambda: living.training.values[0] < 81 and not living.learner.note)
    assert living.learner.follower.trouble == "" and living.learner.follower.unreadable == frozenset()
    assert living.seen.missing == ["version 1 of fragment 0 cannot be read"]


def test_a_new_incarnation_keeps_what_it_has_while_it_looks_for_the_rest() -> None:
    """At its first look one version is missing; by the second, the other has been superseded."""
    log = WrittenLog(RUN)
    missing = log.state.outputs[1]
    data = log.hide(missing)
    living = Living(log, begins=False)
    read = weights_read(living)
    living.until(lambda: living.learner.follower.trouble)
    log.merge(90, applied("l1"))
    living.world.run_for(1.0)
    assert not living.seen.begun and read["weights/0000/000000000000"] == 1, "what it has is not read again"
    log.show(missing, data)
    living.until(lambda: living.seen.begun)
    assert living.seen.adoptions[:2] == [(0, 1), (1, 0)] and living.learner.state == log.state
    assert read["weights/0000/000000000001"] == 1


@pytest.mark.parametrize("kind", ["finish", "stop"])
def test_a_new_incarnation_does_not_outwait_the_run(kind: str) -> None:
    log = WrittenLog(RUN)
    for output in log.state.outputs:
        log.hide(output)
    living = Living(log, begins=False)
    living.world.run_for(10.0)
    assert not living.actor.ended
    log.append(kind)
    living.until(lambda: living.actor.ended)
    assert living.actor.result == log.state and living.training.steps == 0


# -- a rollback -------------------------------------------------------------------------------------------------


def test_at_a_rollback_all_versions_come_at_once() -> None:
    """Nobody trains on a mixture of what is left and what counts."""
    living = followed()
    follower = living.learner.follower
    living.log.roll_back(70)
    living.until(lambda: follower._mail)
    mail = follower.take()
    assert mail is not None and {f: values for f, (_, values, _) in mail.versions.items()} == {0: 70, 1: 70}


def test_a_version_that_was_not_taken_before_a_rollback_is_not_there_after_it() -> None:
    living = followed()
    living.log.merge(90, applied("l1"))
    living.until(lambda: living.learner.follower.state.n == 1)
    living.world.run_for(0.1)
    back = living.log.roll_back(70)
    living.log.hide(back[0])
    living.until(lambda: living.learner.follower.state.n == 2)
    living.world.run_for(5.0)
    mail = living.learner.follower.take()
    assert mail is not None and mail.state.base_floor == 2
    assert {f: values for f, (_, values, _) in mail.versions.items()} == {1: 70}


def test_at_a_rollback_each_version_is_fetched_once_however_often_one_is_looked_for() -> None:
    living = Living(WrittenLog(make_run(fragments=8)))
    living.world.pause(living.actor)
    read = weights_read(living)
    back = living.log.roll_back(70)
    data = living.log.hide(back[7])
    living.until(lambda: read["weights/0007/000000000001"] == LOOKS_FOR_ROLLBACK)
    living.world.run_for(0.1)
    assert [read[f"weights/{fragment:04d}/000000000001"] for fragment in range(7)] == [1] * 7
    mail = living.learner.follower.take()
    assert mail is not None and sorted(mail.versions) == list(range(7)), "it goes back without what cannot be had"
    living.log.show(back[7], data)
    living.world.run_for(2.0)
    later = living.learner.follower.take()
    assert later is not None and sorted(later.versions) == [7]


OTHER = 1  # a fragment that nothing happens to


def begun(merged: int = 100) -> tuple[Fragments, UnitTraining]:
    training = UnitTraining(2)
    fragments = Fragments(training, UnitWire())
    for fragment in range(2):
        fragments.begin(fragment, merged)
    return fragments, training


def train(training: UnitTraining, moved: int) -> None:
    training.values[0] -= moved


@pytest.mark.parametrize(
    ("mixing", "since", "own"),
    [
        ("replace", None, 50),
        ("rebase", None, 40),  # all ten that were trained, on top of 50
        ("rebase", 3, 46),  # the four since offer 3 was sent
    ],
)
def test_a_version_is_taken_over_as_the_mixing_says(mixing: str, since: int | None, own: int) -> None:
    """Six trained, sent, four trained; then version 50 comes."""
    fragments, training = begun(100)
    train(training, 6)
    assert fragments.send(0, 3, keep=True) == 94
    train(training, 4)
    fragments.adopt(0, 50, mixing, since)  # type: ignore[arg-type]
    assert training.values == [own, 100]
    assert fragments.bases == {0: 50, OTHER: 100}, "the next delta is measured from the version itself"


def test_what_is_on_its_way_during_an_adoption_is_as_if_it_had_been_sent_from_the_new_version() -> None:
    """Ten trained and sent; 50 is adopted, which holds none of it; five more trained; then the offer is in 30."""
    fragments, training = begun(100)
    train(training, 10)
    fragments.send(0, 7, keep=True)
    fragments.adopt(0, 50, "rebase", None)
    assert training.values[0] == 40 and fragments.sent[0] == {7: 40}
    train(training, 5)
    fragments.adopt(0, 30, "rebase", 7)
    assert training.values[0] == 25, "the five that came after the send, and nothing of the ten a second time"
    assert fragments.sent[0] == {}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_all_that_is_trained_is_there_once(seed: int) -> None:
    """`rebase`: merges apply an offer or not, at most one is on its way, versions come when they come. The sum of what
    others did and of all own training is what the parameters are at the end."""
    drawn = random.Random(seed)
    fragments, training = begun(0)
    merged = own = others = sent_own = 0
    waits: int | None = None
    for seq in range(60):
        moved = drawn.randint(0, 9)
        train(training, moved)
        own += moved
        if waits is None and drawn.random() < 0.5:
            fragments.send(0, seq, keep=True)
            waits, delta = seq, fragments.bases[0] - training.values[0]
            sent_own = own
        if drawn.random() < 0.5:
            theirs, applied = drawn.randint(0, 9), waits is not None and drawn.random() < 0.5
            others += theirs
            merged -= theirs + (delta if applied else 0)
            fragments.adopt(0, merged, "rebase", waits if applied else None)
            if applied:
                assert merged == -others - sent_own
                waits = None
            assert training.values[0] == -others - own


def watched(*phases: tuple[Phase, float]) -> Stopwatch:
    watch = Stopwatch()
    for phase, seconds in phases:
        watch.took(phase, seconds)
    return watch


def test_a_step_takes_from_one_step_to_the_next_with_what_is_done_between_and_without_waiting() -> None:
    """At the drift bound, or for a merge: that says nothing of how fast its machine is."""
    watch = watched(("hear", 0.125), ("step", 1.0))
    assert watch.step_s == 1.125
    watch = watched(("offer", 0.25), ("save", 0.5), ("wait", 60.0), ("hear", 0.25), ("step", 1.0))
    assert watch.step_s == 2.0


def test_neither_a_hiccup_nor_a_pause_in_one_step_changes_the_pace() -> None:
    watch = watched(*[("step", 1.0)] * 5, ("step", 3600.0), ("step", 1.0), ("step", 0.001))
    assert watch.step_s == 1.0


def test_uploads_and_adoptions_are_moving_averages_that_begin_with_the_first() -> None:
    watch = Stopwatch()
    assert watch.timings(4, 2) == Timings()
    for seconds in (4.0, 2.0):
        watch.uploaded(seconds)
        watch.adopted(2 * seconds)
    watch.took("step", 0.5)
    assert watch.timings(4, 2) == Timings(step_s=0.5, slot_s=1.0, upload_s=3.0, adoption_s=6.0)
