"""What a learner says of a version that cannot be had, and how it goes on until it can."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco_cli.learner import exchange as exchanging
from diloco_cli.learner import loop
from diloco_cli.learner.exchange import Arrival, Exchange
from diloco_cli.learner.loop import Facts, Trainer
from diloco_cli.protocol.joining import News
from diloco_cli.protocol.progress import Progress
from diloco_cli.protocol.records import CommitKind, Output, Rollback, RunFormat
from diloco_cli.protocol.state import RunState
from tests.unit.protocol.records import applied, follow, genesis, make_run, merge


def test_it_is_in_every_beat_and_once_in_the_log_until_its_successor_is_there(
    capfd: pytest.CaptureFixture[str],
) -> None:
    exchange: Any = Exchange.__new__(Exchange)
    exchange.trouble, exchange.progress = "", SimpleNamespace(learner="l0")
    state = genesis()
    gone = News(state, missing=state.outputs[1:])
    for _ in range(3):
        exchange._tell_of(gone)
    assert exchange.trouble == "version 0 of fragment 1 cannot be read"
    exchange._tell_of(replace(gone, missing=()))
    assert exchange.trouble == ""
    said = capfd.readouterr()
    assert (said.out + said.err).count("l0: version 0 of fragment 1 cannot be read; waits for its successor") == 1


def looking(monkeypatch: pytest.MonkeyPatch, run: RunFormat, state: RunState) -> Any:
    """An exchange of a new incarnation, without a store; what it follows is the test's affair."""
    monkeypatch.setattr(exchanging, "perform", lambda news, store, clock: news)
    exchange: Any = Exchange.__new__(Exchange)
    exchange.run, exchange.state, exchange._fetched = run, state, {0: 0, 1: 0}
    exchange._store, exchange._clock = None, SimpleNamespace(sleep_s=lambda seconds: None)
    exchange.trouble, exchange.progress = "", SimpleNamespace(learner="l0")
    return exchange


def test_a_new_incarnation_keeps_what_it_has_while_it_looks_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its first look one version is missing; by the second, another has been superseded."""
    run = make_run()
    before = genesis(run)
    after = merge(before, applied(), run=run)
    missing, newer = before.outputs[1], after.outputs[0]
    answers = [News(before, ((before.outputs[0], "old"),), (missing,)), News(after, ((newer, "new"), (missing, "b")))]
    asked: list[tuple[int, dict[int, int]]] = []

    def followed(run: RunFormat, known: RunState, fetched: dict[int, int], decode: object) -> News:
        asked.append((known.n, dict(fetched)))
        return answers.pop(0)

    monkeypatch.setattr(exchanging, "follow", followed)
    exchange = looking(monkeypatch, run, before)
    arrivals = exchange.load_all()
    assert asked == [(0, {0: -1, 1: -1}), (0, {0: 0, 1: -1})]
    assert [(arrival.output, arrival.values) for arrival in arrivals] == [(newer, "new"), (missing, "b")]
    assert exchange._fetched == {0: 1, 1: 0} and exchange.state == after


@pytest.mark.parametrize("kind", ["finish", "stop"])
def test_a_new_incarnation_does_not_outwait_the_run(monkeypatch: pytest.MonkeyPatch, kind: CommitKind) -> None:
    run = make_run()
    before = genesis(run)
    ended = follow(before, kind, run)
    answers = [News(before, missing=before.outputs), News(ended, missing=before.outputs)]
    monkeypatch.setattr(exchanging, "follow", lambda run, known, fetched, decode: answers.pop(0))
    exchange = looking(monkeypatch, run, before)
    assert exchange.load_all() == [] and exchange.state == ended and not answers


def rolled_back(state: RunState, run: RunFormat) -> RunState:
    outputs = tuple(replace(output, version=state.n + 1) for output in state.outputs)
    return follow(state, "rollback", run, outputs=outputs, rollback=Rollback(state.n))


class Arriving:
    """As much of an exchange as hearing needs: one answer of `arrivals` after the other."""

    def __init__(self, state: RunState, *answers: tuple[RunState, tuple[Output, ...]]) -> None:
        self.state, self.answers, self.adoptions = state, list(answers), list[int]()
        self.timings = SimpleNamespace(step_s=0.1, upload_s=0.0, adoption_s=0.0)
        self.moments = SimpleNamespace(newest=None, forget=lambda: None)

    def arrivals(self) -> tuple[list[Arrival], RunState]:
        self.state, outputs = self.answers.pop(0)
        return [Arrival(output, torch.ones(3), 0.0) for output in outputs], self.state

    def has_base(self, fragment: int) -> bool:
        return True

    def adopted(self, arrival: Arrival) -> None:
        self.adoptions.append(arrival.output.fragment)

    def moments_before_rollback(self, state: RunState) -> None:
        return None


def test_at_tau_a_part_of_a_rollback_that_comes_later_is_adopted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No offer is made before that, so nothing would ever be awaited and take it."""
    run = make_run(adoption="at_tau", overlap=0)
    before = genesis(run)
    back = rolled_back(before, run)
    monkeypatch.setattr(loop, "restore_or_reset", lambda replica, data: False)
    merged = merge(back, applied("l1", base=1), run=run)
    exchange: Any = Arriving(before, (back, back.outputs[:1]), (back, back.outputs[1:]), (merged, merged.outputs[:1]))
    replica: Any = SimpleNamespace(tensors={f"w{fragment}": torch.zeros(3) for fragment in range(2)})
    progress = Progress(run, "l0", 1, before, 0)
    trainer = Trainer(run, progress, exchange, replica, lambda: False, Facts())
    for _ in range(3):
        trainer.hear()
    assert exchange.adoptions == [0, 1] and [book.base.version for book in progress.books] == [1, 1]
    assert list(trainer.held_back) == [0], "a merge waits for its slot"
