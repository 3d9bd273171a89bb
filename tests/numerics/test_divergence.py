"""Runs that really train, and whose loss jumps: by one learner's deltas, or by everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import EvaluationSettings, InnerSettings, OuterSettings, SyncSettings
from diloco_cli.observe.replay import verified
from diloco_cli.protocol.log.commits import Commit, Evaluation, Quarantine, Rollback, Stop
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from diloco_cli.syncer.evaluation import Examiner, evaluation_request
from diloco_cli.training.wire import TensorWire
from tests.numerics.harness import commits, make_run
from tests.numerics.virtual import VirtualFleet

STEP_S = 0.05
BAD = "l1"


class AtOnce:
    """Implements protocol.actors.syncer.Evaluator in this process, with the code of the evaluator's process."""

    def __init__(self, run: RunFormat, store: Store) -> None:
        self.examiner = Examiner(run, store)
        self.answer: tuple[int, float | None] | None = None

    def submit(self, n: int, outputs: tuple[FragmentVersion, ...], final: bool) -> bool:
        assert self.answer is None
        self.answer = n, self.examiner.loss_of(evaluation_request(n, outputs, final))
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
    sync = SyncSettings(every=4, fragments=2, quorum=1, clip="none")
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


def one_bad(evaluation: EvaluationSettings) -> tuple[VirtualFleet, AtOnce]:
    """A run one of whose learners turns bad, and that clips nothing."""
    return lived(
        the_run(40, evaluation), lambda run, name: Flipped(run, 60.0, 16) if name == BAD else TensorWire(run)
    )  # fmt: skip


def test_a_learner_whose_deltas_make_the_loss_jump_again_and_again_pauses_the_run_and_is_seen() -> None:
    fleet, _ = one_bad(EvaluationSettings(1, 64, "rollback", 0.2))
    back, *_, stop = told(fleet.store, Rollback, Stop)
    assert isinstance(back, Rollback) and isinstance(stop, Stop) and stop.diverged
    jump = next(c for c in told(fleet.store, Evaluation) if isinstance(c, Evaluation) and c.jumped)
    assert jump.evaluated == back.evaluated and "the held-out loss jumps to" in jump.reason
    assert f"has jumped to {jump.loss:.4g}" in back.reason
    assert "again after going back" in stop.reason and "diloco quarantine LEARNER" in stop.reason
    deltas = fleet.state.metrics.deltas
    assert deltas[BAD].times_usual > 10 and all(deltas[name].times_usual < 3 for name in deltas if name != BAD)
    assert verified(fleet.store, fleet.run).ok


def test_a_learning_rate_that_is_too_high_everywhere_pauses_the_run() -> None:
    run = the_run(40, EvaluationSettings(1, 64, "rollback", 0.2), OuterSettings("nesterov", 8.0, 0.9))
    fleet, _ = lived(run, lambda run, name: TensorWire(run))
    (stop,) = told(fleet.store, Stop)
    assert isinstance(stop, Stop) and stop.diverged and fleet.state.phase == "STOPPED"
    assert len(told(fleet.store, Rollback)) == 1 and not told(fleet.store, Quarantine)
    assert verified(fleet.store, run).ok


def test_with_pause_the_run_stops_at_the_jump_and_says_how_to_go_on() -> None:
    fleet, _ = one_bad(EvaluationSettings(1, 64, "pause", 0.2))
    (stop,) = told(fleet.store, Stop)
    good = fleet.state.stability.good[-1]
    assert isinstance(stop, Stop) and stop.diverged and fleet.state.phase == "STOPPED"
    assert f"diloco rollback RUN --to {good.n}" in stop.reason and "diloco resume" in stop.reason
    assert not told(fleet.store, Rollback, Quarantine)
    assert verified(fleet.store, fleet.run).ok


def test_with_warn_the_run_goes_on_and_people_see_the_jump() -> None:
    fleet, _ = one_bad(EvaluationSettings(1, 64, "warn", 0.2))
    assert fleet.state.phase == "FINISHED" and not told(fleet.store, Rollback, Quarantine, Stop)
    assert any("the held-out loss jumps to" in note.text for note in fleet.state.metrics.notes)
    assert verified(fleet.store, fleet.run).ok
