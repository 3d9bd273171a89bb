"""Saved moments: what offers name, and what is left of them after a rollback. Who may take a learner's place."""

from __future__ import annotations

from itertools import count

import pytest

from diloco_cli.errors import RefusedError, TerminatedError
from diloco_cli.protocol.actors.joining import HEARD_WITHIN_S, REMEMBERED, Saves, refuse_beside_living
from diloco_cli.protocol.log.keys import heartbeat_key
from tests.unit.protocol.integer_ports import WrittenLog
from tests.unit.protocol.living import Living
from tests.unit.protocol.records import make_run


def saved(*numbers: int) -> Saves:
    """One as of each of these commits."""
    saves = Saves()
    for n in numbers:
        saves.add(f"at {n}", n)
    return saves


def test_offers_name_the_newest() -> None:
    assert saved().newest is None
    assert saved(3, 7).newest == "at 7"


def test_a_rollback_goes_back_to_the_newest_save_that_it_leaves() -> None:
    saves = saved(3, 7, 12)
    assert saves.go_back(((10, 20),)) == "at 7" == saves.newest
    assert saves.go_back(((10, 20), (7, 30))) == "at 7", "a save as of the very commit that it goes back to"
    assert saves.go_back(((10, 20), (7, 30), (2, 40))) is None


def test_a_save_that_a_rollback_has_overtaken_on_its_way_counts_for_nothing() -> None:
    """Made before the learner knew of it, uploaded after."""
    saves = saved(3)
    saves.go_back(((10, 20),))
    saves.add("at 15", 15)
    assert saves.newest == "at 3"
    saves.add("at 20", 20)
    assert saves.newest == "at 20"


def test_what_lies_behind_a_rollback_takes_no_place() -> None:
    saves = saved(*range(1, REMEMBERED + 1))
    saves.go_back(((5, 20),))
    for n in range(21, 26):
        saves.add(f"at {n}", n)
    assert saves.go_back(((5, 20), (4, 30))) == "at 4"


def heard() -> Living:
    """A learner whose heartbeat says how long its step takes, as a process's does."""
    living, seconds = Living(WrittenLog(make_run())), count()
    living.learner.follower._heartbeat_facts = lambda: {"last_step_s": float(next(seconds))}
    living.until(lambda: living.store.get(heartbeat_key("l0")) is not None)
    return living


def test_nobody_takes_the_place_of_a_learner_that_lives_without_a_word() -> None:
    living = heard()
    living.world.run_for(100.0)  # it waits at the drift bound
    another = living.world.start("test", refuse_beside_living(living.run, "l0"))
    assert living.world.run(lambda: another.error is not None, HEARD_WITHIN_S)
    with pytest.raises(RefusedError, match="l0 takes part already: process 1 on test, WAITING"):
        raise another.error or AssertionError


@pytest.mark.parametrize(("says", "waits_s"), [(True, 0.0), (False, HEARD_WITHIN_S)])
def test_the_place_of_a_learner_that_has_left_or_died_is_free(says: bool, waits_s: float) -> None:
    living = heard()
    for actor in list(living.world.actors):
        living.world.kill(actor)
    if says:
        living.learner.ended_by(TerminatedError("SIGTERM"), "SIGTERM")
        living.perform(living.learner.follower.send_heartbeat())
    began_s = living.world.now_s
    living.perform(refuse_beside_living(living.run, "l0"))
    assert waits_s <= living.world.now_s - began_s < waits_s + 1.0
    began_s = living.world.now_s
    living.perform(refuse_beside_living(living.run, "l1"))
    assert living.world.now_s - began_s < 1.0, "nobody was ever heard under this name"
