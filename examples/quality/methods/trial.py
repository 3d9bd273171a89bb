"""One trial of an experiment: a method, settings and a seed in; a held-out loss out. Every method reads the same shards
in the same order, takes the same number of tokens, and is evaluated on the same held-out sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco_cli.clock import monotonic_s
from diloco_cli.config.settings import RunSettings
from diloco_cli.layout import make_layout
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.tapes.player import Player
from diloco_cli.tasks.build import build_model_on_meta
from diloco_cli.tensors.flat import parameter_facts

from .data_parallel import DataParallel
from .pacing import Pacing
from .schedules import make_tape

Kind = Literal["data_parallel", "tape"]
POINTS = 8  # of a trial's curve


@dataclass(frozen=True)
class Trial:
    """`settings.train.tokens` are processed by all learners together. `pacings`: one per learner, in virtual time."""

    kind: Kind
    settings: RunSettings
    pacings: tuple[Pacing, ...]
    quantum_tokens: int
    sequences: int


@dataclass(frozen=True)
class TrialResult:
    """`curve`: (processed tokens of the schedule, held-out loss). `merged`: tokens, weighted by fragment."""

    loss: float
    curve: tuple[tuple[int, float], ...]
    processed: int
    merged: int
    merges: int
    participation: float
    wall_s: float


def run_trial(trial: Trial) -> TrialResult:
    run = make_run(trial)
    return _data_parallel(trial, run) if trial.kind == "data_parallel" else _play(trial, run)


def make_run(trial: Trial) -> RunFormat:
    """The format of the trial's run: one island per pacing, H local steps as the settings say."""
    settings = trial.settings
    islands = tuple(
        Island(f"learner-{i}", "virtual", settings.train.batch_tokens, settings.sync.every, 0.0, pacing.step_s)
        for i, pacing in enumerate(trial.pacings)
    )
    layout = make_layout(parameter_facts(build_model_on_meta(settings)), settings.sync)
    return RunFormat("trial", settings.name, "", settings, islands, layout, "trial")


def _play(trial: Trial, run: RunFormat) -> TrialResult:
    started_s = monotonic_s()
    tape, processed = make_tape(run, trial.pacings, run.settings.train.tokens, trial.quantum_tokens)
    player = Player(tape)
    total, curve = len(tape.merges), []
    marks = {round(total * point / POINTS) for point in range(1, POINTS)}
    for index, _ in enumerate(player.merges(), start=1):
        if index in marks:
            curve.append((processed * index // total, player.held_out_loss(trial.sequences // 4)))
    loss = player.held_out_loss(trial.sequences)
    taken = sum(len(merge.inputs) for merge in tape.merges) / (total * len(run.islands))
    return TrialResult(
        loss=loss,
        curve=(*curve, (processed, loss)),
        processed=processed,
        merged=tape.merges[-1].tokens,
        merges=total,
        participation=taken,
        wall_s=monotonic_s() - started_s,
    )


def _data_parallel(trial: Trial, run: RunFormat) -> TrialResult:
    started_s = monotonic_s()
    job = DataParallel(run)
    target, curve = trial.settings.train.tokens, []
    for point in range(1, POINTS + 1):
        while job.tokens < target * point / POINTS:
            job.step()
        loss = job.held_out_loss(trial.sequences if point == POINTS else trial.sequences // 4)
        curve.append((job.tokens, loss))
    return TrialResult(loss, tuple(curve), job.tokens, job.tokens, job.steps, 1.0, monotonic_s() - started_s)
