"""One call after each optimizer step: what it counts, what it refuses, and how a loop leaves.

The actor's loop stops where it wants a step, and its other operations are performed on the way.

`join`: who is admitted, and what is refused before anything is trained.

A loop whose loader keeps its own state: after a restart each of its batches is trained on once more or skipped, as
the log says.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

from diloco_cli import join
from diloco_cli.clock import sleep_s
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings
from diloco_cli.errors import FencedError, NotFoundError, RunFailedError, TryAgainError, UsageError
from diloco_cli.layout import make_layout, with_buffers
from diloco_cli.loop.island import LentTraining
from diloco_cli.protocol.actors.learner import Progression, Stepped
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat
from diloco_cli.protocol.log.keys import heartbeat_key
from diloco_cli.protocol.log.records import MergedOffer, Offer, decode
from diloco_cli.protocol.log.state import RunPhase
from diloco_cli.runtime.daemon import perform
from diloco_cli.tasks.build import build_model
from diloco_cli.tensors.flat import buffer_facts, parameter_facts
from examples.quality.methods.streaming import StreamingLearner
from tests.numerics.harness import CLOCK, merges
from tests.numerics.own_loops import SYNC, Meeting, OwnLoop, own_run
from tests.numerics.tiny import ROWS, Slope, TinyStream

LONG = 400  # rounds: more than a test takes


def last_heartbeat(meeting: Meeting, name: str = "l0") -> LearnerHeartbeat:
    return decode(LearnerHeartbeat, meeting.store.get(heartbeat_key(name)) or b"", "heartbeat")


def offered(meeting: Meeting) -> list[Offer]:
    keys = meeting.store.list("offer/", limit=10_000)
    return [decode(Offer, data, key) for key in keys if (data := meeting.store.get(key))]  # a sweep may be faster


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
    offered = max((item.data_end for item in applied(meeting)), default=0)
    again = meeting.loop().island
    assert offered <= again.position <= 9 * ROWS
    again.finish(0)


def test_a_loop_that_never_calls_step_is_told_by_its_optimizer() -> None:
    loop = (meeting := Meeting(own_run(rounds=LONG))).loop()
    for _ in range(2):
        loop.train_once()
    with pytest.raises(UsageError, match=r"2 optimizer steps since the last call of island\.step"):
        loop.train_once()
    assert loop.island.over and last_heartbeat(meeting).state == "FAILED"


def test_a_loop_that_waits_in_a_stopped_run_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    island = Meeting(own_run(rounds=LONG)).loop().island
    exchange = island._exchange
    exchange.learner.state = structs.replace(exchange.learner.state, phase=RunPhase.STOPPED)
    exchange._waits_since_s = -inf
    exchange._sleep_s(0.0)
    assert f"l0 waits: the run is STOPPED; go on with: diloco resume {exchange._store.url}" in caplog.messages
    island.fail(KeyboardInterrupt())


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
    loop = (meeting := Meeting(own_run(rounds=LONG))).loop()
    loop.train_once()
    with pytest.raises(RunFailedError, match="the loss is nan at token 0 of shard 0"):
        loop.island.step(tokens=ROWS, loss=float("nan"))
    assert last_heartbeat(meeting).note == "the loss is nan at token 0 of shard 0"


def test_of_two_loops_under_one_name_the_older_one_is_fenced_and_the_newer_one_goes_on() -> None:
    meeting = Meeting(own_run(rounds=10 * LONG))
    older = meeting.loop()
    older.step()
    newer = meeting.loop()
    while not any(item.incarnation == 2 for item in applied(meeting)):
        newer.step()
    with pytest.raises(FencedError, match="a newer process has taken the place of incarnation 1 of l0"):
        while not older.step():
            pass
    newer.step()
    newer.island.finish()
    assert last_heartbeat(meeting).state == "DONE" and last_heartbeat(meeting).incarnation == 2


@pytest.fixture
def overtaken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Meeting, OwnLoop]]:
    """A loop whose predecessor was alive, had more merged after it had joined, and was not fenced for so long."""
    monkeypatch.setattr("diloco_cli.protocol.actors.learner.fence_check_every_s", lambda slot_s: inf)

    def meet(infra: str) -> tuple[Meeting, OwnLoop]:
        meeting = Meeting(own_run(infra, rounds=10 * LONG))
        older = meeting.loop()
        while older.island._exchange.learner.state.merges == 0:  # it has looked for newer ones by then, and found none
            older.step()
        newer = meeting.loop()
        while max(item.data_end for item in applied(meeting)) <= newer.island.position + 4 * ROWS:
            older.step()
        older.island.finish(0)
        head = perform(read_log(meeting.run), meeting.store, CLOCK).n
        while newer.island._exchange.learner.follower.state.n < head:  # or its own steps may pass all of that first
            sleep_s(0.005)
        return meeting, newer

    return meet


def test_a_loop_whose_predecessor_was_alive_and_went_on_is_to_be_started_again(overtaken) -> None:
    meeting, newer = overtaken("loop/addressed")
    with pytest.raises(TryAgainError, match=r"has offered data up to token .* after this one began") as caught:
        while not newer.step():
            pass
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
    first = meeting.loop(learner=StreamingLearner)  # all that it has trained is offered
    for _ in range(11):
        first.step()
    first.island.finish(10.0)  # it has no more slots to adopt in, so it waits for all of that
    first.island.finish()
    assert (last_heartbeat(meeting).state, last_heartbeat(meeting).note) == ("DONE", "its loop has ended")
    assert max(item.data_end for item in applied(meeting)) == 11 * ROWS
    again = meeting.loop().island
    assert again.position == 11 * ROWS
    again.finish(0)


def test_an_error_in_the_loop_is_told_in_the_last_heartbeat_without_secrets_and_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting = Meeting(own_run(rounds=LONG))
    monkeypatch.setenv("HF_TOKEN", "hf_canary4713")
    with pytest.raises(RuntimeError), meeting.loop().island:
        raise RuntimeError("401 for https://me:canary-password@host/x?token=abc of hf_canary4713")
    said = last_heartbeat(meeting)
    assert said.state == "FAILED" and said.note.startswith("your code: tests/unit/loop/test_island.py:")
    assert said.note.endswith("RuntimeError: 401 for https://***@host/x?token=*** of ***")


@pytest.mark.parametrize("drain_s", [0, 0.5])
def test_a_loop_whose_last_progress_cannot_be_merged_in_time_leaves_nevertheless(drain_s: float) -> None:
    meeting = Meeting(own_run(learners=2, rounds=LONG, sync=replace(SYNC, quorum=2)))
    loop = meeting.loop()
    loop.step()
    loop.island.finish(drain_s)
    assert last_heartbeat(meeting).state == "DONE" and not applied(meeting)


def test_a_loop_in_a_with_statement_leaves_in_order() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    loop = meeting.loop()
    with loop.island:
        loop.step()
    assert loop.island.over and last_heartbeat(meeting).state == "DONE"


def test_moments_are_saved_and_restored_by_the_next_process() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    first = meeting.loop()
    while not any(offer.inner for offer in offered(meeting)):
        first.step()
    first.island.finish()
    second = meeting.loop()
    assert not second.island.moments_lost
    assert all(second.optimizer.state[parameter]["step"] > 0 for parameter in second.model.parameters())


@pytest.mark.parametrize("carries", [True, False])
def test_a_loop_whose_steps_change_buffers_that_the_run_does_not_carry_is_refused(carries: bool) -> None:
    run, model = own_run(rounds=LONG), nn.BatchNorm1d(3)
    names = {"running_mean", "running_var", "num_batches_tracked"} if carries else {"running_mean"}
    layout = with_buffers(make_layout(parameter_facts(model), run.settings.sync), buffer_facts(model, names))
    training = LentTraining(replace(run, layout=layout), model, torch.optim.AdamW(model.parameters()))
    steps, before = training.step(0, 4, Progression(0.0, 0, False)), training.read(0)
    next(steps)
    model(torch.randn(4, 3))
    with pytest.raises(StopIteration if carries else UsageError) as ended:
        steps.send(Stepped(4, 1.0))
    if not carries:
        assert "training changes running_var (and 1 more)" in str(ended.value)
        return
    after = training.read(0)
    training.write(0, before)
    assert model.running_mean is not None and not model.running_mean.any() and model.num_batches_tracked == 0
    training.write(0, after)
    assert model.running_mean.all() and model.num_batches_tracked == 1


def test_a_model_with_two_parameters_in_one_memory_is_refused_and_left_as_it_is() -> None:
    meeting = Meeting(own_run(rounds=LONG))
    model = build_model(meeting.run.settings)
    first = next(iter(model.parameters()))
    other = next(p for p in model.parameters() if p.shape == (5,))
    other.data = first.data.view(-1)[:5]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match="shares memory with another parameter"):
        join(meeting.url, name="l0", model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


ROOM = {"rounds": 400}


def with_shards(count: int) -> Meeting:
    run = own_run(**ROOM)
    return Meeting(replace(run, settings=replace(run.settings, data=replace(run.settings.data, shards=count))))


def test_the_package_imports_no_torch_until_join_is_asked_for() -> None:
    code = "import sys, diloco_cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ImportError):
        from diloco_cli import no_such_name  # noqa: F401


def test_an_island_that_the_run_does_not_know_is_admitted_with_its_class_of_data() -> None:
    meeting = with_shards(3)
    island = meeting.loop("guest", batch_tokens=2 * ROWS).island
    assert (island.data, island.shard, island.num_shards) == ("external", 1, 3)
    member = perform(read_log(meeting.run), meeting.store, CLOCK).members[0]
    assert (member.name, member.infra, member.batch_tokens) == ("guest", "loop/external", 2 * ROWS)
    island.finish(0)
    again = meeting.loop("guest").island
    assert (again.data, again.shard) == ("external", 1)
    again.finish(0)
    full = meeting.loop("other", data="addressed").island
    assert full.data == "addressed"
    with pytest.raises(UsageError, match="the data has 3 shards"):
        meeting.loop("more")
    full.finish(0)


def test_a_model_of_another_layout_is_refused() -> None:
    meeting, other = Meeting(own_run(**ROOM)), Slope()
    with pytest.raises(UsageError, match=r"run.s: a is missing in the run and \[3\] here; 5 more differ"):
        join(meeting.url, name="l0", model=other, optimizer=torch.optim.AdamW(other.parameters()))


def test_an_optimizer_of_another_model_is_refused() -> None:
    meeting = Meeting(own_run(**ROOM))
    model, other = (build_model(meeting.run.settings) for _ in range(2))
    with pytest.raises(UsageError, match="does not hold 4 of the model's parameters, among them first"):
        join(meeting.url, name="l0", model=model, optimizer=torch.optim.AdamW(other.parameters()))


def test_another_class_of_data_than_the_runs_is_refused() -> None:
    meeting = Meeting(own_run(**ROOM))
    with pytest.raises(UsageError, match="data='addressed' in run tiny, not 'external'"):
        meeting.loop(data="external")
    with pytest.raises(UsageError, match="must be one of addressed, stateful, external, not 'adressed'"):
        meeting.loop(data="adressed")


def test_an_island_of_diloco_learner_is_refused() -> None:
    with pytest.raises(UsageError, match=r"trained by diloco learner \(infra: local\)") as caught:
        Meeting(own_run("local", **ROOM)).loop()
    assert "hint: " in caught.value.__notes__[0]


@pytest.mark.parametrize("run", ["memory://nothing-here", "file:///nothing/here"])
def test_a_run_that_is_not_there_is_said(run: str) -> None:
    model = Slope()
    with pytest.raises(NotFoundError, match=f"no run at {run}") as caught:
        join(run, name="a", model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert "diloco runs" in caught.value.__notes__[0]


class SGDWithAPast(torch.optim.SGD):
    """Keeps what no tensor holds."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01, momentum=0.9)

    def step(self) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["past"] = ["a", "b"]


def test_a_step_that_calls_its_base_class_counts_once() -> None:
    model = Slope()
    torch.optim.SGD(model.parameters())  # from now on torch calls hooks for the base class's step, too
    loop = Meeting(own_run(**ROOM)).loop(optimizer=SGDWithAPast)
    assert [loop.step() for _ in range(3)] == [False] * 3
    loop.island.finish(0)


def test_state_that_is_not_saved_is_said_and_lost_on_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    meeting = Meeting(own_run(**ROOM, inner=InnerSettings(lr=0.01, save_every=1)))
    with caplog.at_level(logging.WARNING, "diloco"):
        first = meeting.loop(optimizer=SGDWithAPast)
        assert not first.island.moments_lost
        for _ in range(12):
            first.step()
    assert caplog.text.count("the state of SGDWithAPast is not saved") == 1
    first.island.finish()
    second = meeting.loop(optimizer=SGDWithAPast)
    assert second.island.moments_lost
    second.island.finish(0)


INNER = InnerSettings(lr=0.01, schedule="constant", warmup_steps=0, save_every=2)


class Counter:
    """Batch number n; its state is the number of the next one."""

    def __init__(self) -> None:
        self.next = 0
        self.loaded: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]
        self.loaded.append(self.next)


def meeting(save_every: int = INNER.save_every) -> Meeting:
    return Meeting(own_run("loop/stateful", rounds=4000, inner=replace(INNER, save_every=save_every)))


def without_saves(run: Meeting) -> Meeting:
    for key in run.store.list("inner/"):
        run.store.delete(key)
    return run


def saved_and_named(loop: OwnLoop) -> Callable[[int], bool]:
    """After some steps, two rounds of offers since a save among them."""
    named_after: list[int] = []

    def holds(steps: int) -> bool:
        if loop.island._exchange.learner.saves.newest is not None:
            named_after.append(steps)
        return steps >= 30 and bool(named_after) and steps >= named_after[0] + 2 * loop.run.settings.sync.every

    return holds


def trained(loop: OwnLoop, loader: Counter, enough: int | Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """The batches that were skipped, and those that were trained on, until there are so many."""
    holds = enough if callable(enough) else lambda steps: steps == enough
    skipped: list[int] = []
    done: list[int] = []
    loop.island.resume(loader)
    for number in loader:
        if loop.island.skips(tokens=ROWS):
            skipped.append(number)
            continue
        loss = loop.model(*TinyStream().batch(0, 1, number * ROWS, ROWS))
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
        done.append(number)
        loop.island.step(tokens=ROWS, loss=loss)
        if holds(len(done)):
            return skipped, done
    raise AssertionError


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr=lr), lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)],
)
def test_a_restarted_loop_skips_what_was_offered_after_the_state_was_saved(optimizer: Any) -> None:
    run, makes = meeting(), lambda model: optimizer(model.parameters(), lr=0.01)
    first = run.loop(optimizer=makes)
    _, done = trained(first, Counter(), saved_and_named(first))
    assert done == list(range(len(done)))
    first.island.fail(KeyboardInterrupt())
    merged = max(item.data_end for commit in merges(run.store) for item in commit.inputs) // ROWS
    second, loader = run.loop(optimizer=makes), Counter()
    start = second.island.position // ROWS
    assert merged <= start <= len(done)
    skipped, again = trained(second, loader, 5)
    (loaded,) = loader.loaded
    goes_on = max(start, loaded)  # the newest save may hold more than was offered
    assert 0 < loaded <= len(done) and skipped == list(range(loaded, start))
    assert again == list(range(goes_on, goes_on + 5)) and second.island.position == (goes_on + 5) * ROWS
    second.island.finish(0)


def test_a_loop_that_leaves_in_order_goes_on_where_it_stood_also_before_its_first_save() -> None:
    run = meeting(save_every=1000)
    first = run.loop()
    trained(first, Counter(), 6)
    first.island.finish()
    second, loader = run.loop(), Counter()
    skipped, done = trained(second, loader, 1)
    assert (loader.loaded, skipped, done, second.island.moments_lost) == ([6], [], [6], False)
    second.island.finish(0)


def test_without_a_saved_state_everything_that_was_offered_is_skipped() -> None:
    run = meeting()
    first = run.loop(learner=StreamingLearner)
    trained(first, Counter(), 6)
    first.island.finish()
    second, loader = without_saves(run).loop(), Counter()
    skipped, _ = trained(second, loader, 1)
    assert not loader.loaded and skipped == list(range(6))
    second.island.finish(0)


def test_a_loop_that_does_not_resume_its_loader_or_does_not_skip_is_told() -> None:
    run = meeting()
    loop = run.loop()
    loop.train_once()
    with pytest.raises(UsageError, match="no loader was resumed"):
        loop.island.step(tokens=ROWS)
    run = meeting()
    first = run.loop(learner=StreamingLearner)
    trained(first, Counter(), 6)
    first.island.finish()
    second = without_saves(run).loop()
    second.island.resume(Counter())
    second.train_once()
    with pytest.raises(UsageError, match=f"{6 * ROWS} tokens of it are left to skip"):
        second.island.step(tokens=ROWS)


def test_only_stateful_data_has_a_loader_to_resume() -> None:
    loop = Meeting(own_run()).loop()
    with pytest.raises(UsageError, match="has addressed data in this run"):
        loop.island.resume(Counter())
