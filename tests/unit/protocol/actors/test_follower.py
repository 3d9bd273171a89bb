"""How a learner follows the log: what it hands to the training and when, and versions that cannot be had."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from diloco_cli.protocol.actors.learner import LOOKS_FOR_ROLLBACK
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.operations import Get, Operation
from diloco_cli.protocol.rules.pacing import DENSE_BOUNDS_S, EARLY, MAX_REQUESTS, SHORT_SLOT_S
from diloco_cli.virtual.world import Actor
from tests.unit.protocol.integer_ports import UnitTraining, WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import applied, make_run, with_steps

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
    living.log.merge(90, applied("l1"))
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
