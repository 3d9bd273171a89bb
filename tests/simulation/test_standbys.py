"""Syncers that stand by: one of them takes over when nobody is heard, and however many there are, one chain."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.run_file import SHORTEST_TAKEOVER_S
from diloco_cli.config.settings import SyncerSettings
from diloco_cli.errors import FencedError
from diloco_cli.protocol.actors.standby import (
    FIRST_SYNCER_S,
    HEARD_WITHIN_S,
    PROMPT_S,
    SPREAD,
    Standby,
    patience_s,
    takeover_s,
)
from diloco_cli.protocol.actors.syncer import HEARTBEAT_EVERY_S, NoEvaluator, Syncer
from diloco_cli.protocol.log.commit_log import BAD_READS_S, READS_AGAIN_S
from diloco_cli.protocol.log.keys import commit_key
from diloco_cli.protocol.log.mending import LOOKS_EVERY_S
from diloco_cli.protocol.log.operations import Create, Sleep, Steps
from diloco_cli.protocol.log.records import ProcessClaim, RunFormat
from diloco_cli.protocol.log.state import RunState, SyncerState
from diloco_cli.signing import Checksummed
from diloco_cli.syncer.daemon import begin
from diloco_cli.virtual.world import Actor
from tests.faulty_world import Fault, FaultyWorld
from tests.histories.integers import IntegerArithmetic, first_version, state_bytes, weights_bytes
from tests.simulation.operated import asked, command, done, resumed, state_of
from tests.simulation.sweeps import check
from tests.simulation.toy import ToyFleet, make_run

TAKEOVER_S = 6.0
LOOKS_S = 3.0  # a look late, and the time that a heartbeat was old when it was first seen
SYNCERS = ("syncer", "standby-1", "standby-2")


def with_standbys(run: RunFormat, **syncer: Any) -> RunFormat:
    settings = SyncerSettings(takeover_s=TAKEOVER_S, **syncer)
    return replace(run, settings=replace(run.settings, syncer=settings))


class StandbyFleet(ToyFleet):
    """A syncer and standbys; whoever of them dies or is fenced comes back as a standby, as under a supervisor."""

    def __init__(self, run: RunFormat, world: FaultyWorld | None = None, seed: int = 0) -> None:
        super().__init__(run, world)
        self._pids = count(100)
        self._random = random.Random(seed)
        self.takeovers: list[tuple[float, str, str]] = []
        self.revive, self.loading_s = True, 0.0
        self.claims: dict[int, ProcessClaim] = {}
        self.serving: dict[str, Syncer] = {}  # those that have taken over

    def leave(self, name: str) -> None:
        """This syncer says its goodbye, and ends."""
        (actor,), syncer = self.living(name), self.serving[name]
        self.world.kill(actor)
        syncer.doing = SyncerState.DONE
        self.world.start("goodbye", syncer.send_heartbeat(self.world.now_s, force=True))

    def claim(self) -> ProcessClaim:
        self._claim = replace(super().claim(), pid=next(self._pids))
        return self._claim

    def syncer(self, name: str = "syncer", delay_s: float = 0.0) -> Actor:
        actor = super().syncer(name, delay_s)
        self.claims[actor.number] = self._claim
        return actor

    def newest_claim(self) -> dict[str, Any]:
        keys = self.world.store.list("epoch/", limit=100_000)
        return dict(json.loads(self.world.store.get(keys[-1]) or b"")) if keys else {"nonce": ""}

    def standby(self, name: str, dead_pid: int | None = None, delay_s: float = 0.0, alike: bool = False) -> Actor:
        claim = self.claim()

        def load() -> Steps[None]:
            yield Sleep(self.loading_s)

        waiting = Standby(self.run, claim, name, self._random.random(), dead_pid, alike=alike, load=load)

        def steps() -> Steps[RunState | None]:
            reason = yield from waiting.wait()
            if reason is None:
                return None
            self.takeovers.append((self.world.now_s, name, reason))
            arithmetic = IntegerArithmetic(self.run, self._refuse, self._unfit)
            syncer = Syncer(self.run, claim, arithmetic, NoEvaluator(), lambda: "then", self.nonce, because=reason)
            self.serving[name] = syncer
            return (yield from syncer.serve())

        actor = self.world.start(name, steps(), delay_s)
        self.claims[actor.number] = claim
        return actor

    def with_standbys(self, number: int) -> StandbyFleet:
        self.start()
        for name in SYNCERS[1 : number + 1]:
            self.standby(name)
        return self

    def epochs(self) -> list[dict[str, Any]]:
        return [record for record in self.records() if record["kind"] == "epoch_start"]

    def _ended(self, actor: Actor) -> None:
        if actor.name not in SYNCERS:
            return super()._ended(actor)
        if self.revive and (actor.error is not None or actor.result is None) and not self.over():
            self.standby(actor.name, self.claims[actor.number].pid, delay_s=0.2)
        return None

    def over(self) -> bool:
        return not any(self.living(island.name) for island in self.run.islands)


def after_commits(fleet: StandbyFleet, number: int) -> Actor:
    """The syncer that serves, once there are so many commits."""
    fleet.until_commits(number)
    (serving,) = fleet.living("syncer")
    return serving


RUN = with_standbys(make_run(merges=30))


def test_a_standby_takes_over_a_dead_syncer_within_its_patience() -> None:
    for seed in range(3):
        fleet = StandbyFleet(RUN, seed=seed).with_standbys(1)
        fleet.revive = False
        fleet.world.kill(after_commits(fleet, 8))
        killed_s = fleet.world.now_s
        fleet.finish()
        ((taken_s, name, reason),) = fleet.takeovers
        assert name == "standby-1" and "epoch 1 was silent for" in reason
        assert TAKEOVER_S - LOOKS_S <= taken_s - killed_s <= TAKEOVER_S * (1 + SPREAD) + LOOKS_S
        assert [record["epoch"] for record in fleet.epochs()] == [1, 2]
        assert "standby-1 takes over" in fleet.epochs()[1]["reason"]
        assert check(fleet).kinds.count("finish") == 1


def test_a_syncer_that_serves_or_only_waits_is_never_replaced() -> None:
    """With one learner of two there is no quorum: nothing is committed for minutes, and the heartbeats are enough."""
    fleet = StandbyFleet(with_standbys(make_run(merges=30, quorum=2, skip_after_s=1e6)))
    fleet.syncer()
    fleet.learner("l0")
    fleet.standby("standby-1")
    fleet.standby("standby-2")
    fleet.world.run_for(120.0)
    assert len(fleet.epochs()) == 1 and fleet.takeovers == []


def test_a_stop_sends_standbys_home_and_a_resumed_run_is_served_again() -> None:
    fleet = StandbyFleet(with_standbys(make_run(merges=30), on_learners=True))
    fleet.revive = False
    for name in SYNCERS[1:]:
        fleet.standby(name)
    fleet.start_learners()
    fleet.until_commits(8)
    asked(fleet, "stop")
    fleet.finish()
    assert fleet.records()[-1]["kind"] == "stop" and fleet.errors() == []
    stopped_s = fleet.world.now_s
    assert resumed(fleet)
    for name in SYNCERS[1:]:
        fleet.standby(name)
    fleet.start_learners()
    fleet.finish()
    assert fleet.takeovers[-1][0] - stopped_s <= PROMPT_S and "no syncer served" in fleet.takeovers[-1][2]
    assert check(fleet).kinds.count("finish") == 1


@pytest.mark.parametrize("on_learners", [True, False])
def test_no_standby_and_no_syncer_resumes_a_stopped_run_until_an_operator_does(on_learners: bool) -> None:
    """A learner that comes back on a machine whose owner knows of no stop brings its standby with it."""
    fleet = StandbyFleet(with_standbys(make_run(merges=30), on_learners=on_learners))
    fleet.revive = False
    fleet.standby("standby-1") if on_learners else fleet.syncer()
    fleet.start_learners()
    fleet.until_commits(8)
    asked(fleet, "stop")
    fleet.finish()
    stopped, dead = fleet.num_commits(), fleet.newest_claim()["pid"]
    for name, dead_pid in (("standby-1", None), ("standby-2", dead)):
        fleet.standby(name, dead_pid)
    late = fleet.syncer("by-hand")
    fleet.start_learners()
    fleet.world.run_for(FIRST_SYNCER_S + 10 * TAKEOVER_S)
    assert fleet.num_commits() == stopped and late.result.phase == "STOPPED"
    assert resumed(fleet) and not resumed(fleet), "a second resume finds that it was asked for"
    fleet.finish(within_s=FIRST_SYNCER_S + 60.0)
    assert check(fleet).kinds.count("finish") == 1


def test_standbys_alone_begin_a_run_at_once_where_learners_host_them() -> None:
    fleet = StandbyFleet(with_standbys(make_run(merges=6), on_learners=True))
    for name in SYNCERS:
        fleet.standby(name)
    fleet.start_learners()
    fleet.finish()
    assert fleet.takeovers[0][0] <= PROMPT_S
    assert len(fleet.epochs()) == 1 and check(fleet).kinds.count("finish") == 1


def test_standbys_wait_for_the_syncer_of_its_own_that_is_still_starting() -> None:
    fleet = StandbyFleet(RUN)
    fleet.standby("standby-1")
    fleet.world.run_for(FIRST_SYNCER_S)
    fleet.start()
    fleet.finish()
    assert fleet.takeovers == [] and len(fleet.epochs()) == 1


def test_whoever_replaces_the_dead_one_that_served_does_not_wait() -> None:
    fleet = StandbyFleet(RUN).with_standbys(1)
    fleet.revive = False
    fleet.world.kill(after_commits(fleet, 8))
    died_s = fleet.world.now_s
    dead = json.loads(fleet.world.store.get("epoch/0000000001.json") or b"")
    fleet.standby("syncer", dead_pid=dead["pid"])
    fleet.standby("standby-2", dead_pid=dead["pid"] + 50)
    fleet.finish()
    ((taken_s, name, reason),) = fleet.takeovers
    assert name == "syncer" and taken_s - died_s < 0.5 and "is dead" in reason
    assert check(fleet).kinds.count("finish") == 1


@pytest.mark.parametrize("begun", [False, True])
def test_of_syncers_alike_one_serves_at_once_and_one_that_leaves_is_followed_at_once(begun: bool) -> None:
    """As units that an engine takes and brings back. `begun`: the run was created with its first commit."""
    fleet = StandbyFleet(with_standbys(make_run(merges=30)))
    fleet.revive = False
    if begun:
        first = [first_version(fragment) for fragment in range(fleet.run.num_fragments)]
        versions = [(state_bytes(*version), weights_bytes(version[0])) for version in first]
        done(fleet, fleet.world.start("launch", begin(fleet.run, versions, fleet.claim(), lambda: "then", fleet.nonce)))
    began_s = fleet.world.now_s
    for name in SYNCERS[:2]:
        fleet.standby(name, alike=True)
    fleet.start_learners()
    fleet.until_commits(8)
    ((taken_s, served, _),) = fleet.takeovers
    assert taken_s - began_s <= PROMPT_S
    fleet.leave(served)
    left_s = fleet.world.now_s
    fleet.world.run_for(PROMPT_S + LOOKS_S)
    fleet.standby(served, alike=True)  # requeued: the other one goes on serving
    fleet.finish()
    _, (taken_s, follows, reason) = fleet.takeovers
    assert taken_s - left_s <= PROMPT_S + LOOKS_S and follows != served and "has left" in reason
    assert fleet.errors() == []
    assert check(fleet).kinds.count("finish") == 1


@pytest.mark.parametrize("ends", ["leaves", "dies", "serves on"])
def test_a_standby_that_begins_and_cannot_read_the_log_asks_those_who_hold_it_and_fences_nobody(ends: str) -> None:
    """The learners look at the newest commit alone, unless they are asked for another one."""
    run = replace(with_standbys(make_run(merges=1000)), checksums=True, keyring=Checksummed("id"))
    fleet = StandbyFleet(run)
    fleet.revive = False
    fleet.standby("syncer", alike=True)
    fleet.start_learners()
    fleet.until_commits(8)
    if ends == "leaves":
        fleet.leave("syncer")
    elif ends == "dies":
        fleet.world.kill(*fleet.living("syncer"))
    key = commit_key(0)
    before = fleet.world.store.get(key) or b""
    fleet.world.store.put(key, bytes([before[0] ^ 1]) + before[1:])
    began_s = fleet.world.now_s
    for name in SYNCERS[1:]:
        fleet.standby(name, alike=True)
    if ends != "serves on":  # it goes on to a snapshot, from which the standbys read
        assert fleet.world.run(lambda: fleet.world.store.get(key) == before, BAD_READS_S / 2)
    fleet.world.run_for(TAKEOVER_S * (1 + SPREAD) + LOOKS_S)
    fleet.until_commits(fleet.num_commits() + 8)
    assert fleet.errors() == []
    taken_s = [at_s - began_s for at_s, _, _ in fleet.takeovers[1:]]
    assert len(taken_s) == (ends != "serves on")
    if ends == "leaves":
        assert taken_s[0] <= LOOKS_EVERY_S + READS_AGAIN_S + PROMPT_S + LOOKS_S, "its goodbye is not forgotten"


@pytest.mark.parametrize("alike", [True, False], ids=["jobs", "beside learners"])
def test_who_has_taken_over_may_load_for_a_while_what_a_syncer_needs(alike: bool) -> None:
    """On a disk that many nodes share, or a busy machine: before, another one replaced it, and was replaced while it
    loaded."""
    fleet = StandbyFleet(with_standbys(make_run(merges=30), on_learners=not alike))
    fleet.revive, fleet.loading_s = False, FIRST_SYNCER_S
    fleet.standby("syncer-0", alike=alike)
    for delay_s in (0.0, PROMPT_S + LOOKS_S):  # together with it, and while it loads
        fleet.standby(f"syncer-after-{delay_s:g}", delay_s=delay_s, alike=alike)
    fleet.start_learners()
    fleet.finish()
    assert len(fleet.takeovers) == 1 and fleet.errors() == []


def test_one_that_was_killed_while_it_loaded_takes_over_as_soon_as_it_is_back_and_has_loaded() -> None:
    fleet = StandbyFleet(with_standbys(make_run(merges=30), on_learners=True))
    fleet.revive, fleet.loading_s = False, FIRST_SYNCER_S
    killed = fleet.standby("standby-l0")
    fleet.world.run_for(PROMPT_S + LOOKS_S)
    fleet.world.kill(killed)
    fleet.standby("standby-l1")
    fleet.world.run_for(PROMPT_S + LOOKS_S + fleet.loading_s)
    assert [name for _, name, _ in fleet.takeovers] == ["standby-l1"]


@pytest.mark.parametrize("loading_s", [0.0, FIRST_SYNCER_S])
def test_a_resumed_run_whose_last_syncer_died_without_a_word_waits_a_few_seconds_for_it(loading_s: float) -> None:
    """A command had answered the stop; the machine that served does not come back."""
    fleet = StandbyFleet(with_standbys(make_run(merges=100), on_learners=True))
    fleet.revive = False
    fleet.standby("standby-l0")
    fleet.start_learners()
    fleet.until_commits(8)
    fleet.kill_all()
    asked(fleet, "stop")
    done(fleet, command(fleet))
    assert resumed(fleet)
    fleet.loading_s = loading_s
    fleet.standby("standby-l1")
    fleet.world.run_for(HEARD_WITHIN_S + PROMPT_S + LOOKS_S + loading_s)
    assert [name for _, name, _ in fleet.takeovers] == ["standby-l0", "standby-l1"]


def test_an_outage_that_everybody_felt_makes_nobody_take_over() -> None:
    """The store was away for a minute; when it is back, the standbys look before the syncer has said a word."""
    world = FaultyWorld()
    fleet = StandbyFleet(with_standbys(make_run(merges=1000)), world).with_standbys(2)
    fleet.world.run_for(5.0)
    back_s = world.now_s + 60.0
    world.held_until_s = lambda actor, _: back_s + 1.0 if actor.name == "syncer" else 0.0
    fleet.world.run_for(3.0)  # all that it said before has been heard
    world.held_until_s = lambda actor, _: back_s + 1.0 if actor.name == "syncer" else back_s
    fleet.world.run_for(70.0)
    assert fleet.takeovers == [] and len(fleet.epochs()) == 1 and not fleet.over()


@pytest.mark.parametrize("num_standbys", [1, 2])
def test_a_frozen_syncer_that_wakes_after_the_takeover_is_fenced_and_stands_by(num_standbys: int) -> None:
    for point in range(40, 400, 120):
        world = FaultyWorld(faults={("syncer", point): Fault.PAUSE})
        fleet = StandbyFleet(RUN, world, seed=point).with_standbys(num_standbys)
        (frozen,) = fleet.living("syncer")
        assert world.run(lambda f=frozen: f.paused or f.ended, 60)  # type: ignore[misc]
        world.run(lambda f=fleet: bool(f.takeovers) and len(f.epochs()) > 1, 60)  # type: ignore[misc]
        world.resume(frozen)
        fleet.finish()
        assert isinstance(frozen.error, FencedError), point
        assert [type(error) for error in fleet.errors()] == [FencedError]
        assert len(fleet.epochs()) == 2 and check(fleet).kinds.count("finish") == 1


def test_syncers_that_work_slower_than_standbys_bear_do_not_take_the_work_from_each_other_for_ever() -> None:
    """A merged version's upload takes three times the usual patience, and a syncer is silent meanwhile."""

    def latency_s(actor: Actor, call: object) -> float:
        return 20.0 if isinstance(call, Create) and "state/" in call.key and "/000000000000-" not in call.key else 0.001

    world = FaultyWorld(latency_s=latency_s)
    fleet = StandbyFleet(with_standbys(make_run(merges=8)), world).with_standbys(2)
    fleet.finish(within_s=1500.0)
    assert 1 < len(fleet.epochs()) <= 8, "it begins with takeovers, and they end"
    assert check(fleet).kinds.count("finish") == 1


def test_patience_is_jittered_doubled_and_follows_a_slow_syncer() -> None:
    assert patience_s(6.0, 0.0, 0) == 6.0
    assert patience_s(6.0, 0.5, 0) == 7.5
    assert patience_s(20.0, 0.0, 3) == 160.0
    assert patience_s(6.0, 0.0, 100) == 6.0 * 64


def test_a_silence_is_four_slots_as_planned_and_fifteen_seconds_at_least() -> None:
    run = make_run(learners=2, fragments=2)
    assert takeover_s(run) == 15.0
    slow = tuple(replace(island, step_s=10.0) for island in run.islands)
    assert takeover_s(replace(run, islands=slow)) == 4 * 2 * 10.0
    assert takeover_s(with_standbys(run)) == TAKEOVER_S >= 2 * HEARTBEAT_EVERY_S
    assert SHORTEST_TAKEOVER_S >= 2 * HEARTBEAT_EVERY_S, "a syncer that only waits is heard in time"


HUGE = b'{"slowest_s":1' + b"0" * 400 + b"}"


@pytest.mark.parametrize(
    "said", [b"", b"[]", b'{"slowest_s":"x"}', b'{"slowest_s":1e999}', b'{"slowest_s":-5}', b"\xff", HUGE]
)
def test_a_strangers_heartbeat_neither_stops_a_standby_nor_makes_it_wait_for_ever(said: bytes) -> None:
    fleet = StandbyFleet(RUN).with_standbys(1)
    fleet.revive = False
    fleet.world.kill(after_commits(fleet, 8))
    fleet.world.store.put("heartbeat/syncer.json", said)
    fleet.finish(within_s=1000.0)
    assert len(fleet.takeovers) == 1


def test_only_syncers_that_served_and_merged_nothing_make_a_standby_patient() -> None:
    """A command's epochs are no takeovers, and merge nothing by their nature."""
    fleet = StandbyFleet(RUN).with_standbys(0)
    fleet.revive = False
    fleet.world.kill(after_commits(fleet, 8))
    for _ in range(3):
        asked(fleet, "gc")
        done(fleet, command(fleet))
    assert len(fleet.epochs()) == 4 and state_of(fleet).fruitless == 0
    killed_s = fleet.world.now_s
    fleet.standby("standby-1")
    fleet.finish()
    ((taken_s, _, _),) = fleet.takeovers
    assert taken_s - killed_s <= TAKEOVER_S * (1 + SPREAD) + LOOKS_S
    assert check(fleet).kinds[-1] == "finish"
