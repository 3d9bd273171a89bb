"""Runs that really train, and whose loss jumps: by one learner's deltas, or by everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import EvaluationSettings, InnerSettings, OuterSettings, SyncSettings
from diloco_cli.observe.replay import verified
from diloco_cli.protocol.log import directions
from diloco_cli.protocol.log.commits import Commit, Evaluation, Quarantine, Rollback, Stop
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.rules import norms
from diloco_cli.protocol.rules.rejudging import LeaveOut
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from diloco_cli.syncer.evaluation import Examiner, evaluation_request, trial_request
from diloco_cli.syncer.trials import Repetition, state_at
from diloco_cli.syncer.versions import state_spec
from diloco_cli.tensors.payload import from_bytes
from diloco_cli.training.wire import TensorWire
from tests.numerics.harness import commits, key_of_state, make_run
from tests.numerics.virtual import VirtualFleet

STEP_S = 0.05
BAD = "l1"


class AtOnce:
    """Implements protocol.actors.ports.Evaluator in this process, with the code of the evaluator's process."""

    def __init__(self, run: RunFormat, store: Store) -> None:
        self.examiner = Examiner(run, store)
        self.answer: tuple[int, float | None] | None = None
        self.trials: list[LeaveOut] = []

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        return self._ask(evaluation_request(n, outputs, final))

    def try_without(self, trial: LeaveOut) -> bool:
        self.trials.append(trial)
        return self._ask(trial_request(trial))

    def _ask(self, request: dict[str, Any]) -> bool:
        assert self.answer is None
        self.answer = request["n"], self.examiner.loss_of(request)
        return True

    def result(self) -> tuple[int, float | None] | None:
        answer, self.answer = self.answer, None
        return answer


class Flipped(TensorWire):
    """From some offer on, deltas of the other sign, a few times as long."""

    def __init__(self, run: RunFormat, times: float, since: int) -> None:
        super().__init__(run)
        self.times, self.since = times, since

    def encode(self, fragment: int, seq: int, applied: int | None, base: Any, values: Any) -> bytes:
        if seq >= self.since:
            values = base + self.times * (base - values)
        return super().encode(fragment, seq, applied, base, values)


def the_run(rounds: int, evaluation: EvaluationSettings, outer: OuterSettings | None = None) -> RunFormat:
    sync = SyncSettings(every=4, fragments=2, quorum=1, max_step="none", clip="none")
    inner = InnerSettings("adamw", lr=0.01, warmup_steps=0, schedule="constant", save_every=1)
    run = make_run(3, rounds, sync, outer or OuterSettings("nesterov", 0.7, 0.5), inner)
    return replace(run, settings=replace(run.settings, evaluation=evaluation))


def lived(run: RunFormat, wire: Callable[[RunFormat, str], TensorWire]) -> tuple[VirtualFleet, AtOnce]:
    """Until the run ends or pauses."""
    made: list[AtOnce] = []

    def evaluator(run: RunFormat, store: MemoryStore) -> AtOnce:
        made.append(AtOnce(run, store))
        return made[0]

    fleet = VirtualFleet(
        run, lambda name, step: STEP_S, lambda name, number: 0.001, lambda name, number: 0.001, wire, evaluator
    )
    assert fleet.world.run(lambda: fleet.state.phase != "RUNNING", 10_000.0)
    fleet.world.run_for(5.0)
    return fleet, made[0]


def told(store: Store, *kinds: type[Commit]) -> list[Commit]:
    return [commit for commit in commits(store) if isinstance(commit, kinds)]


def one_bad(monkeypatch: pytest.MonkeyPatch, evaluation: EvaluationSettings) -> tuple[VirtualFleet, AtOnce]:
    """A run one of whose learners turns bad; neither its norms nor its directions stand in its way."""
    monkeypatch.setattr(norms, "CAP", 1e9)
    monkeypatch.setattr(directions, "OPPOSES", 1e9)
    return lived(
        the_run(40, evaluation), lambda run, name: Flipped(run, 60.0, 16) if name == BAD else TensorWire(run)
    )  # fmt: skip


def test_the_one_learner_whose_deltas_make_the_loss_jump_is_held_back_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, evaluator = one_bad(monkeypatch, EvaluationSettings(1, 64, "rollback", 0.2))
    back, blamed = told(fleet.store, Rollback, Quarantine)
    assert isinstance(back, Rollback) and isinstance(blamed, Quarantine)
    jump = next(c for c in told(fleet.store, Evaluation) if isinstance(c, Evaluation) and c.jumped)
    assert isinstance(jump, Evaluation) and jump.evaluated == back.evaluated == blamed.evaluated
    assert blamed.learner == BAD and "its deltas alone made the loss jump" in blamed.reason
    assert f"has jumped to {jump.loss:.4g}" in back.reason and "the held-out loss jumps to" in jump.reason
    assert fleet.state.phase == "FINISHED" and not told(fleet.store, Stop)
    assert jump.loss is not None and fleet.state.metrics.loss is not None and fleet.state.metrics.loss < jump.loss
    assert len(evaluator.trials) <= 10
    assert verified(fleet.store, fleet.run).ok


def test_a_learning_rate_that_is_too_high_everywhere_blames_nobody_and_pauses_the_run() -> None:
    run = the_run(40, EvaluationSettings(1, 64, "rollback", 0.2), OuterSettings("nesterov", 4.0, 0.9))
    fleet, _ = lived(run, lambda run, name: TensorWire(run))
    (stop,) = told(fleet.store, Stop)
    assert isinstance(stop, Stop) and stop.diverged and fleet.state.phase == "STOPPED"
    assert "by the deltas of each learner alone: the run diverges everywhere" in stop.reason
    assert "lower train.inner.lr" in stop.reason and "diloco resume" in stop.reason
    assert len(told(fleet.store, Rollback)) == 1 and not told(fleet.store, Quarantine)
    assert verified(fleet.store, run).ok


def test_with_pause_the_run_stops_at_the_jump_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, evaluator = one_bad(monkeypatch, EvaluationSettings(1, 64, "pause", 0.2))
    (stop,) = told(fleet.store, Stop)
    good = fleet.state.stability.good[-1]
    assert isinstance(stop, Stop) and stop.diverged and fleet.state.phase == "STOPPED"
    assert f"diloco rollback --to {good.n}" in stop.reason and "diloco resume" in stop.reason
    assert not told(fleet.store, Rollback, Quarantine) and not evaluator.trials
    assert verified(fleet.store, fleet.run).ok


def test_with_warn_the_run_goes_on_and_people_see_the_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = one_bad(monkeypatch, EvaluationSettings(1, 64, "warn", 0.2))
    assert fleet.state.phase == "FINISHED" and not told(fleet.store, Rollback, Quarantine, Stop)
    assert any("the held-out loss jumps to" in note.text for note in fleet.state.metrics.notes)
    assert verified(fleet.store, fleet.run).ok


def test_recorded_merges_with_all_their_deltas_give_the_recorded_versions_bit_for_bit() -> None:
    fleet, _ = lived(the_run(12, EvaluationSettings(100)), lambda run, name: TensorWire(run))
    head = fleet.state.n
    made = Repetition(fleet.run, fleet.store, LeaveOut(9, head, ("nobody",))).run_through()
    state = state_at(fleet.run, fleet.store, head)
    for fragment, output in enumerate(state.outputs):
        kept = from_bytes(
            fleet.store.get(key_of_state(output)) or b"", state_spec(len(made[fragment]), fleet.run.settings.outer.name)
        )
        assert torch.equal(made[fragment], kept["parameters"])


def test_without_a_learner_other_versions_come_out_and_without_all_the_good_one_stays() -> None:
    fleet, _ = lived(the_run(12, EvaluationSettings(100)), lambda run, name: TensorWire(run))
    whole = Repetition(fleet.run, fleet.store, LeaveOut(9, fleet.state.n, ("nobody",))).run_through()
    without = Repetition(fleet.run, fleet.store, LeaveOut(9, fleet.state.n, (BAD,))).run_through()
    none = Repetition(fleet.run, fleet.store, LeaveOut(9, fleet.state.n, ("l0", "l1", "l2"))).run_through()
    then = state_at(fleet.run, fleet.store, 9)
    for fragment, output in enumerate(then.outputs):
        kept = from_bytes(
            fleet.store.get(key_of_state(output)) or b"", state_spec(len(none[fragment]), fleet.run.settings.outer.name)
        )
        assert torch.equal(none[fragment], kept["parameters"])
        assert not torch.equal(whole[fragment], without[fragment])
