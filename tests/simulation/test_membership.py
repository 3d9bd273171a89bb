"""Islands that the launch did not know join, work and leave; slow ones and small ones weigh what they bring."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings
from diloco_cli.errors import UsageError
from diloco_cli.protocol.actors.membership import MAX_JOINS_PER_LOOK
from diloco_cli.protocol.log.keys import join_key
from diloco_cli.protocol.log.records import Island, Join, RunFormat, encode
from diloco_cli.signing import learner_signer
from diloco_cli.virtual.world import Actor
from tests.faulty_world import FaultyWorld
from tests.simulation.operated import asked, command, resumed, state_of
from tests.simulation.sweeps import check, finished
from tests.simulation.toy import BATCH_TOKENS, ToyFleet, make_run


def elastic(shards: int | None = 4, **arguments: object) -> RunFormat:
    run = make_run(**{"learners": 2, "fragments": 3, "merges": 90, **arguments})  # type: ignore[arg-type]
    return replace(run, settings=replace(run.settings, data=DataSettings(shards=shards)))


def joined_half_way(
    run: RunFormat, world: FaultyWorld | None = None, batch_tokens: int = BATCH_TOKENS, after: int = 20
) -> ToyFleet:
    fleet = ToyFleet(run, world).start().until_commits(after)
    fleet.newcomer("spot", batch_tokens)
    return fleet


def inputs_of(fleet: ToyFleet, name: str) -> list[dict[str, Any]]:
    return [item for record in fleet.records() for item in record.get("inputs", []) if item["learner"] == name]


def test_an_island_joins_half_way_through_the_newest_commit() -> None:
    fleet = joined_half_way(elastic())
    found, state = finished(fleet), state_of(fleet)
    at = found.kinds.index("membership")
    merged = inputs_of(fleet, "spot")
    assert at >= 20 and len(merged) >= 10
    assert min(item["base"] for item in merged) >= 20 - 3, "it did not begin with the newest versions"
    assert state.learner("spot").token_parameters == sum(item["tokens"] for item in merged)
    assert sum(known.token_parameters for known in state.learners.values()) == state.token_parameters
    assert [island.name for island in state.members] == ["spot"]
    run = state.with_members(fleet.run)
    assert [run.shard_of(island.name) for island in run.all_islands] == [0, 1, 2]
    assert run.num_shards == fleet.run.num_shards == 4
    assert min(item["data_start"] for item in merged) < 6 * BATCH_TOKENS, "its shard is read from its start"


def test_what_a_newcomer_says_of_its_own_speed_is_not_believed() -> None:
    fleet = joined_half_way(elastic())
    fleet.world.run(lambda: bool(state_of(fleet).members), 10)
    (member,) = state_of(fleet).members
    assert (member.local_steps, member.tokens_per_s, member.step_s) == (fleet.run.settings.sync.every, 0.0, 0.0)


@pytest.mark.parametrize("leaver", ["spot", "l1"])
def test_one_that_leaves_has_everything_merged_first(leaver: str) -> None:
    fleet = joined_half_way(elastic(merges=100))
    fleet.profile[leaver].leaves = lambda: fleet.num_commits() >= 60
    fleet.finish()
    (actor,) = [a for a in fleet.world.actors if a.name == leaver]
    outcomes, left = check(fleet).settled, actor.result
    own = {offer for offer in fleet.published.offers if offer[0] == leaver}
    assert left.phase == "RUNNING" and own and own <= set(outcomes)
    assert {outcomes[offer] for offer in sorted(own)[-3:]} == {"applied"}
    last = {json.loads(fleet.published.offers[offer])["fragment"]: offer[2] for offer in sorted(own)}
    assert {f: a.seq for f, a in left.learner(leaver).applied.items()} == last, "not all of its last offers were merged"
    assert state_of(fleet).learner(leaver) == left.learner(leaver)


def test_many_that_ask_at_once_join_by_one_commit() -> None:
    fleet = ToyFleet(elastic(64)).start().until_commits(5)
    epoch = state_of(fleet).epoch
    for name in [f"spot{number}" for number in range(MAX_JOINS_PER_LOOK)]:
        join = Join(Island(name, "here", BATCH_TOKENS, 1, 1.0, 1.0), epoch, 0, "n", "then")
        key = join_key(name, epoch, 0)
        fleet.world.store.create(key, fleet.run.keyring.sign(learner_signer(name), key, encode(join)))
    assert fleet.world.run(lambda: len(state_of(fleet).members) == MAX_JOINS_PER_LOOK, 10.0)
    assert fleet.kinds().count("membership") == 1


def test_of_two_that_ask_for_the_last_shard_one_gets_it_and_the_other_is_told() -> None:
    fleet = ToyFleet(elastic(3)).start().until_commits(5)
    first, second = fleet.newcomer("a"), fleet.newcomer("b")
    fleet.world.run(fleet.ended, 60)
    assert check(fleet).kinds.count("membership") == 1
    assert len([actor for actor in (first, second) if isinstance(actor.error, UsageError)]) == 1
    assert [str(actor.error) for actor in (first, second) if actor.error is not None] == [
        "toy: no island of the run is called 'b', and it may not join: the data has 3 shards "
        "(data.shards at the launch), and 3 islands have one each"
    ]
    assert [actor.error.hint.partition(".")[0] for actor in (first, second) if actor.error is not None] == [
        "the run's islands: l0, l1, a"
    ]
    assert "refuse" not in fleet.kinds(), "the log keeps no word of it"


def left_with_a_word(actor: Actor) -> bool:
    return isinstance(actor.error, UsageError) and "is STOPPED: no island can join it" in str(actor.error)


@pytest.mark.parametrize("name", ["spot", "late"], ids=["a member", "a stranger"])
def test_one_that_comes_to_a_stopped_run_is_told_and_leaves(name: str) -> None:
    fleet = joined_half_way(elastic(merges=100))
    fleet.world.run(lambda: "spot" in state_of(fleet).learners, 20)
    asked(fleet, "stop")
    fleet.finish()
    late = fleet.newcomer(name)
    fleet.ended_within(late, 30)
    assert left_with_a_word(late) and state_of(fleet).phase == "STOPPED"


@pytest.mark.parametrize("first", ["stop", "join"])
def test_one_that_comes_while_the_run_is_being_stopped_leaves_with_a_word(first: str) -> None:
    """Both are asked for before anybody answers: a command that stops the run admits nobody."""
    fleet = ToyFleet(elastic(merges=100)).start().until_commits(5)
    fleet.restart = False
    fleet.kill("syncer")
    if first == "stop":
        asked(fleet, "stop")
    late = fleet.newcomer("spot")
    fleet.world.run_for(0.1)
    if first == "join":
        asked(fleet, "stop")
    command(fleet)
    assert fleet.world.run(fleet.ended, 60)
    assert state_of(fleet).phase == "STOPPED" and state_of(fleet).members == ()
    assert left_with_a_word(late)


def test_a_request_that_a_stop_left_open_takes_no_shard_when_the_run_goes_on() -> None:
    """Its writer was told, and has left."""
    fleet = ToyFleet(elastic(merges=60)).start().until_commits(5)
    fleet.restart = False
    fleet.kill("syncer")
    late = fleet.newcomer("spot")
    fleet.world.run_for(1.0)
    asked(fleet, "stop")
    command(fleet)
    assert fleet.world.run(fleet.ended, 60) and left_with_a_word(late)
    assert fleet.world.store.list("join/") and resumed(fleet)
    fleet.restart = True
    fleet.start()
    fleet.finish()
    assert "membership" not in check(fleet).kinds and state_of(fleet).phase == "FINISHED"


# -- what islands weigh -----------------------------------------------------------------------------------------
