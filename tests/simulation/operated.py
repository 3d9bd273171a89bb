"""What the tests of operators' commands share: a small run with snapshots at hand, and commands as actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RetentionSettings
from diloco_cli.protocol.actors import collection, syncer
from diloco_cli.protocol.actors.requests import StandIn, ask, withdraw_stop
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import RequestKind, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.virtual.world import Actor
from tests.faulty_world import Fault, FaultyWorld
from tests.simulation.toy import ToyFleet, make_run

SNAPSHOTS_EVERY = 5  # commits: histories of 30 have some


def run_that_keeps(rounds: int | str = "all", grace_s: float = 0.1, **made: object) -> RunFormat:
    run = make_run(**made)  # type: ignore[arg-type]
    retention = RetentionSettings(rounds, grace_s)  # type: ignore[arg-type]
    return replace(run, settings=replace(run.settings, retention=retention))


def saving(run: RunFormat) -> RunFormat:
    """Learners save their moments every round."""
    train = replace(run.settings.train, inner=replace(run.settings.train.inner, save_every=1))
    return replace(run, settings=replace(run.settings, train=train))


@pytest.fixture
def frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncer, "SNAPSHOT_EVERY", SNAPSHOTS_EVERY)
    monkeypatch.setattr(collection, "FLOORS_APART", 3)


def done(fleet: ToyFleet, actor: Actor, within_s: float = 30.0) -> Actor:
    assert fleet.world.run(lambda: actor.ended, within_s), f"{actor.name} did not end"
    if actor.error is not None:
        raise actor.error
    return actor


def state_of(fleet: ToyFleet) -> RunState:
    state: RunState = done(fleet, fleet.world.start("reader", read_log(fleet.run))).result
    return state


def started(run: RunFormat, commits: int, world: FaultyWorld | None = None) -> ToyFleet:
    return ToyFleet(run, world).start().until_commits(commits + 1)


def asked(fleet: ToyFleet, kind: RequestKind, learner: str | None = None, to: int | None = None) -> Actor:
    """As an operator asks. Its result is the number."""
    keyring = fleet.run.keyring
    steps = ask(state_of(fleet), kind, fleet.nonce(), "then", "wanted", learner=learner, to=to, keyring=keyring)
    return done(fleet, fleet.world.start("operator", steps))


def resumed(fleet: ToyFleet) -> bool:
    """As `diloco resume` does before it starts units. Whether it had to ask."""
    steps = withdraw_stop(fleet.run, state_of(fleet), fleet.nonce(), "then")
    return bool(done(fleet, fleet.world.start("operator", steps)).result)


def request(fleet: ToyFleet, kind: RequestKind, learner: str | None = None, to: int | None = None) -> int:
    number: int = asked(fleet, kind, learner, to).result
    return number


def answered(fleet: ToyFleet, kind: RequestKind, learner: str | None = None, to: int | None = None) -> RunState:
    """Waits until it is answered, one way or the other."""
    number = request(fleet, kind, learner, to)
    assert fleet.world.run(lambda: state_of_last_request(fleet) > number, 30), "nobody answered"
    return state_of(fleet)


def state_of_last_request(fleet: ToyFleet) -> int:
    named = (record.get("request") for record in fleet.records())
    return max((number + 1 for number in named if number is not None), default=0)


def stand_in(fleet: ToyFleet) -> Steps[RunState]:
    return StandIn(fleet.run, fleet.claim(), "then", fleet.nonce).serve()


def command(fleet: ToyFleet) -> Actor:
    return fleet.world.start("command", stand_in(fleet))


def by_the_command(fleet: ToyFleet, kind: RequestKind, learner: str | None = None, to: int | None = None) -> Actor:
    """No syncer lives: the command carries it out, or dies over it. Then a syncer comes back."""
    fleet.restart = False
    fleet.kill("syncer")
    asked(fleet, kind, learner, to)
    actor = command(fleet)
    assert fleet.ended_within(actor, 30)
    fleet.restart = True
    fleet.syncer()
    return actor


def where_the_command_dies(
    prepared: Callable[[FaultyWorld], ToyFleet],
    every: int,
    kind: RequestKind,
    learner: str | None = None,
    to: int | None = None,
) -> Iterator[ToyFleet]:
    """After a command that lives, one that dies at each `every`-th of its operations."""
    fleet = prepared(FaultyWorld())
    total = by_the_command(fleet, kind, learner, to).operations
    yield fleet
    for point in range(0, total, every):
        fleet = prepared(FaultyWorld(faults={("command", point): Fault.CRASH}))
        by_the_command(fleet, kind, learner, to)
        yield fleet


def note_texts(state: RunState) -> list[str]:
    return [note.text for note in state.metrics.notes]
