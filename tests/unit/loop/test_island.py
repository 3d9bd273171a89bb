"""One call after each optimizer step: what it counts, what it refuses, and how a loop leaves."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.errors import FencedError, RunFailedError, TryAgainError, UsageError
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat
from diloco_cli.protocol.log.keys import heartbeat_key
from diloco_cli.protocol.log.records import MergedOffer
from diloco_cli.protocol.log.wire import decode
from tests.numerics.harness import merges
from tests.numerics.own_loops import SYNC, Meeting, OwnLoop, own_run
from tests.numerics.tiny import ROWS

LONG = 400  # rounds: more than a test takes


def last_heartbeat(meeting: Meeting, name: str = "l0") -> LearnerHeartbeat:
    return decode(LearnerHeartbeat, meeting.store.get(heartbeat_key(name)) or b"", "heartbeat")


def applied(meeting: Meeting) -> list[MergedOffer]:
    return [item for commit in merges(meeting.store) for item in commit.inputs]


def test_a_loop_trains_to_the_end_of_the_run_and_draws_each_position_once() -> None:
    meeting = Meeting(own_run())
    loop = meeting.loop()
    assert (loop.island.shard, loop.island.num_shards, loop.island.position) == (0, 1, 0)
    loop.to_end()
    meeting.threads.join()
    assert loop.drawn == list(range(0, len(loop.drawn) * ROWS, ROWS))
    assert loop.island.over and loop.island.step(tokens=ROWS) and loop.island.tokens_left == 0
    assert last_heartbeat(meeting).state == "DONE" and last_heartbeat(meeting).step == len(loop.drawn)


def test_a_loop_that_comes_after_the_end_has_nothing_to_train() -> None:
    meeting = Meeting(own_run())
    meeting.loop().to_end()
    meeting.threads.join()
    late = meeting.loop().island
    assert late.over and late.tokens_left == 0 and not [*late.sampler(10, tokens_each=1)]


def test_progress_goes_from_nothing_to_all() -> None:
    meeting = Meeting(own_run())
    loop, seen = meeting.loop(), []
    left = loop.island.tokens_left
    assert left == meeting.run.settings.train.tokens
    while not loop.island.over:
        seen.append(loop.island.progress)
        loop.step()
    assert seen[0] == 0.0 and seen == sorted(seen) and seen[-1] > 0.8


def test_a_call_without_an_optimizer_step_adds_its_tokens_to_the_next_one() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    island = (loop := meeting.loop()).island
    assert not island.step(tokens=ROWS // 2) and island.position == 0
    loop.train_once()
    assert not island.step(tokens=ROWS // 2) and island.position == ROWS
    island.finish(0)


def test_a_step_that_the_optimizer_left_out_counts_its_tokens() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    island = meeting.loop().island
    island.step(tokens=ROWS, skipped=True)
    assert island.position == ROWS
    island.finish(0)


def test_calls_that_were_left_out_are_an_error_at_the_next_one_and_nothing_is_lost() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    loop = meeting.loop()
    for _ in range(9):
        loop.step()
    loop.train_once()
    loop.train_once()
    with pytest.raises(UsageError, match=r"2 optimizer steps since the last call of island\.step") as caught:
        loop.island.step(tokens=ROWS)
    assert caught.value.__notes__ == ["hint: call island.step(tokens=..., loss=...) right after each optimizer.step()"]
    assert loop.island.over and last_heartbeat(meeting).state == "FAILED"
    offered = max(item.data_end for item in applied(meeting))
    again = meeting.loop().island
    assert offered <= again.position <= 9 * ROWS
    again.finish(0)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(ROWS + 1, "and l0 may take 4 at most"), (-1, "whole number"), (2.5, "whole number")],
)
def test_tokens_that_cannot_be_are_refused(tokens: int, words: str) -> None:
    loop = Meeting(own_run(rounds=LONG)).loop()
    loop.train_once()
    with pytest.raises(UsageError, match=words):
        loop.island.step(tokens=tokens)


def test_a_loss_that_is_not_finite_ends_the_loop_before_anything_of_it_is_offered() -> None:
    loop = Meeting(own_run(rounds=LONG)).loop()
    loop.train_once()
    with pytest.raises(RunFailedError, match="the loss is nan at token 0 of shard 0"):
        loop.island.step(tokens=ROWS, loss=float("nan"))


def test_of_two_loops_under_one_name_the_older_one_is_fenced_and_the_newer_one_goes_on() -> None:
    meeting = Meeting(own_run(rounds=10 * LONG))
    older = meeting.loop()
    older.step()
    newer = meeting.loop()
    while not any(item.incarnation == 2 for item in applied(meeting)):
        newer.step()
    with pytest.raises(FencedError, match="a newer process has taken the place of incarnation 1 of l0"):
        while True:
            older.step()
    newer.step()
    newer.island.finish()
    assert last_heartbeat(meeting).state == "DONE" and last_heartbeat(meeting).incarnation == 2


@pytest.fixture
def overtaken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Meeting, OwnLoop]]:
    """A loop whose predecessor was alive, had more merged after it had joined, and was not fenced for so long."""
    monkeypatch.setattr("diloco_cli.protocol.actors.follower.fence_check_every_s", lambda slot_s: inf)

    def meet(infra: str) -> tuple[Meeting, OwnLoop]:
        meeting = Meeting(own_run(infra, rounds=10 * LONG))
        older = meeting.loop()
        while older.island._exchange.learner.state.merges == 0:  # it has looked for newer ones by then, and found none
            older.step()
        newer = meeting.loop()
        while max(item.data_end for item in applied(meeting)) <= newer.island.position + 4 * ROWS:
            older.step()
        older.island.finish(0)
        return meeting, newer

    return meet


def test_a_loop_whose_predecessor_was_alive_and_went_on_is_to_be_started_again(overtaken) -> None:
    meeting, newer = overtaken("loop/addressed")
    with pytest.raises(TryAgainError, match=r"has offered data up to token .* after this one began") as caught:
        while True:
            newer.step()
    assert caught.value.__notes__ == ["hint: start this loop again: it goes on after that"]
    third = meeting.loop().island
    assert third.position >= max(item.data_end for item in applied(meeting))
    third.finish(0)


def test_external_data_goes_on_whatever_positions_were_offered_meanwhile(overtaken) -> None:
    meeting, newer = overtaken("loop/external")
    while not any(item.incarnation == 2 for item in applied(meeting)):
        newer.step()
    ranges = [(commit.outputs[0].fragment, item) for commit in merges(meeting.store) for item in commit.inputs]
    for fragment in range(2):
        ends = [end for f, item in ranges if f == fragment for end in (item.data_start, item.data_end)]
        assert ends == sorted(ends), "no position counts twice, whatever was read there"
    newer.island.finish()


def test_a_loop_that_finishes_early_has_its_last_progress_merged_and_goes_on_later_from_there() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    first = meeting.loop()
    for _ in range(11):
        first.step()
    first.island.finish()
    first.island.finish()
    assert last_heartbeat(meeting).state == "DONE"
    assert max(item.data_end for item in applied(meeting)) == 11 * ROWS
    again = meeting.loop().island
    assert again.position == 11 * ROWS
    again.finish(0)


def test_an_error_in_the_loop_is_told_in_the_last_heartbeat_and_passed_on() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    with pytest.raises(ZeroDivisionError), meeting.loop().island as island:
        island.step(tokens=ROWS // 0)
    assert last_heartbeat(meeting).state == "FAILED"


@pytest.mark.parametrize("drain_s", [0, 0.5])
def test_a_loop_whose_last_progress_cannot_be_merged_in_time_leaves_nevertheless(drain_s: float) -> None:
    meeting = Meeting(own_run(learners=2, rounds=LONG, sync=replace(SYNC, quorum=2)))
    loop = meeting.loop()
    loop.step()
    loop.island.finish(drain_s)
    assert last_heartbeat(meeting).state == "DONE" and not applied(meeting)


def test_a_loop_that_its_user_stops_has_not_failed() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    with pytest.raises(KeyboardInterrupt), meeting.loop().island:
        raise KeyboardInterrupt
    assert (last_heartbeat(meeting).state, last_heartbeat(meeting).note) == ("DONE", "before its first step")


def test_a_loop_in_a_with_statement_leaves_in_order() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    loop = meeting.loop()
    with loop.island:
        loop.step()
    assert loop.island.over and last_heartbeat(meeting).state == "DONE"


def test_moments_are_saved_and_restored_by_the_next_process() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    first = meeting.loop()
    while first.island._exchange.learner.saves.newest is None:
        first.step()
    for _ in range(3 * meeting.run.settings.sync.every):  # offers that name the save
        first.step()
    first.island.finish()
    second = meeting.loop()
    assert not second.island.moments_lost
    assert all(second.optimizer.state[parameter]["step"] > 0 for parameter in second.model.parameters())
