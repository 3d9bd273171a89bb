"""What the tests of operators' commands share: a small run with snapshots at hand, and commands as actors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.config.settings import RetentionSettings
from diloco_cli.protocol.actors import collection, syncer
from diloco_cli.protocol.actors.operators import StandIn
from diloco_cli.protocol.actors.requests import ask
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import RequestKind, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.virtual.world import Actor, World
from tests.simulation.toy import Fleet, make_run

SNAPSHOTS_EVERY = 5  # commits: histories of 30 have some


def run_that_keeps(rounds: int | str = "all", grace_s: float = 0.1, **made: object) -> RunFormat:
    run = make_run(**made)  # type: ignore[arg-type]
    retention = RetentionSettings(rounds, grace_s)  # type: ignore[arg-type]
    return replace(run, settings=replace(run.settings, retention=retention))


@pytest.fixture
def frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (syncer, collection):
        monkeypatch.setattr(module, "SNAPSHOT_EVERY", SNAPSHOTS_EVERY)


def done(fleet: Fleet, actor: Actor, within_s: float = 30.0) -> Actor:
    assert fleet.world.run(lambda: actor.ended, within_s), f"{actor.name} did not end"
    if actor.error is not None:
        raise actor.error
    return actor


def state_of(fleet: Fleet) -> RunState:
    state: RunState = done(fleet, fleet.world.start("reader", read_log(fleet.run))).result
    return state


def num_commits(fleet: Fleet) -> int:
    return len(fleet.world.store.list("commit/"))


def until_commit(fleet: Fleet, n: int) -> Fleet:
    assert fleet.world.run(lambda: num_commits(fleet) > n, 60), f"no commit {n}"
    return fleet


def started(run: RunFormat, commits: int, world: World | None = None) -> Fleet:
    return until_commit(Fleet(run, world).start(), commits)


def request(fleet: Fleet, kind: RequestKind, learner: str | None = None, to: int | None = None) -> int:
    """Ask as an operator does, and wait until it is answered, one way or the other. Returns the number."""
    steps = ask(state_of(fleet), kind, fleet.nonce(), "then", "wanted", learner=learner, to=to)
    number: int = done(fleet, fleet.world.start("operator", steps)).result
    return number


def answered(fleet: Fleet, kind: RequestKind, learner: str | None = None, to: int | None = None) -> RunState:
    number = request(fleet, kind, learner, to)
    assert fleet.world.run(lambda: state_of_last_request(fleet) > number, 30), "nobody answered"
    return state_of(fleet)


def state_of_last_request(fleet: Fleet) -> int:
    import json

    n = num_commits(fleet)
    named = (json.loads(fleet.world.store.get(f"commit/{k:012d}.json") or b"{}").get("request") for k in range(n))
    return max((number + 1 for number in named if number is not None), default=0)


def stand_in(fleet: Fleet) -> Steps[RunState]:
    return StandIn(fleet.run, fleet.claim(), "then", fleet.nonce).serve()


def kill_syncer(fleet: Fleet) -> None:
    for actor in fleet.living("syncer"):
        fleet.world.kill(actor)


def note_texts(state: RunState) -> list[str]:
    return [note.text for note in state.metrics.notes]
