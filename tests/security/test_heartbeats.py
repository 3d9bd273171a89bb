"""Forged heartbeats hinder no takeover and are shown to nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.observe.facts import Local, read_facts
from diloco_cli.observe.situation import NOT_GENUINE, Look
from diloco_cli.observe.status import status_of
from diloco_cli.protocol.actors.requests import ask
from diloco_cli.protocol.actors.standby import Standby, takeover_s
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, sealed
from diloco_cli.protocol.log.keys import SYNCER, heartbeat_key
from diloco_cli.protocol.log.operations import Put, Sleep, Steps
from diloco_cli.protocol.log.records import ProcessClaim, RunFormat
from diloco_cli.runtime.daemon import SystemClock
from diloco_cli.signing import LOG, UNSIGNED, learner_signer
from tests.security.signed import SignedFleet, as_learner, as_reader, as_syncer, signed_run
from tests.simulation.operated import done, state_of
from tests.simulation.toy import make_run


def beats(run: RunFormat, how: str, seconds: int) -> Steps[None]:
    """One a second, by a syncer, or by a forger: unsigned, as a learner, with a key for another run, old ones anew."""
    key, mine = heartbeat_key(SYNCER), as_syncer(run).keyring
    another = as_syncer(signed_run(replace(run, run_id="another", signing=None))).keyring
    keyring = {"unsigned": UNSIGNED, "as a learner": as_learner(run, "l0").keyring, "of another run": another}
    for count in range(1, seconds):
        epoch, told = (1, count % 10 + 1) if how == "old ones" else (1 if how == "genuine" else 99, count)
        fact = {"state": "SERVING", "epoch": epoch, "heartbeats": told, "n": 1, "host": "host"}
        role = learner_signer("l0") if how == "as a learner" else LOG
        yield Put(key, sealed(keyring.get(how, mine), role, key, fact))
        yield Sleep(1.0)


@pytest.mark.parametrize("how", ["unsigned", "as a learner", "of another run", "old ones"])
def test_forged_heartbeats_of_a_syncer_keep_no_standby_from_taking_over(how: str) -> None:
    fleet = SignedFleet(signed_run(make_run(merges=100))).start().until_commits(5)
    fleet.kill_all()
    run, world = fleet.run, fleet.world
    claim = ProcessClaim(0, "n", "other", 2, "then", "test")
    waiting = world.start("standby", Standby(as_syncer(run), claim, "standby-1", 0.0).wait())
    usual_s = takeover_s(run)
    living = world.start("living", beats(run, "genuine", int(3 * usual_s)))
    assert world.run(lambda: living.ended, 4 * usual_s) and not waiting.ended, "a living syncer is heard"
    world.start("forger", beats(run, how, int(10 * usual_s)))
    assert world.run(lambda: waiting.ended, 3 * usual_s) and "takes over" in waiting.result


def test_a_forged_heartbeat_of_a_learner_is_not_shown() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=100))).start().until_commits(5)
    key = heartbeat_key("l0")
    forged = LearnerHeartbeat("FAILED", 1, 9, 200, 0, 95.0, 0, note="pay here")
    fleet.world.store.put(key, sealed(as_learner(fleet.run, "l1").keyring, learner_signer("l1"), key, forged))
    facts = read_facts("memory://", as_reader(fleet.run), fleet.world.store, SystemClock(lambda: 0.0, print, print))
    assert "l0" not in facts.learners and facts.strange == {"l0"}
    assert Look(facts, Local()).missing["l0"] == NOT_GENUINE


def test_a_learner_whose_key_is_revoked_is_told_as_that() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=10_000))).start().until_commits(5)
    key = as_learner(fleet.run, "l0").keyring.public(learner_signer("l0"))
    asked = ask(state_of(fleet), "revoke", "n", "then", "stolen", revoke=key, keyring=fleet.run.keyring)
    done(fleet, fleet.world.start("operator", asked))
    assert fleet.world.run(lambda: key in state_of(fleet).revoked, 10.0)
    facts = read_facts("memory://", as_reader(fleet.run), fleet.world.store, SystemClock(lambda: 0.0, print, print))
    assert facts.strange == {"l0"} and "revoked" in Look(facts, Local()).missing["l0"]
    assert state_of(fleet).learner("l0").floor > 2**32, "with the key in it"
    assert next(row for row in status_of(facts).learners if row.name == "l0").incarnation == 1
