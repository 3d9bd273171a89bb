"""One trial of an experiment: a method, settings and a seed in; a held-out loss out. Every method reads the same shards
in the same order, takes the same number of tokens, and is evaluated on the same held-out sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from diloco_cli.clock import monotonic_s
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RunSettings
from diloco_cli.layout import make_layout
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.syncer.arithmetic import TorchArithmetic, load_versions
from diloco_cli.syncer.evaluation import held_out_loss
from diloco_cli.tasks.build import Data, build_data, build_model, build_model_on_meta
from diloco_cli.tensors.flat import bare_parameters, parameter_facts
from diloco_cli.training.replica import DeviceTraining, Replica
from diloco_cli.training.wire import TensorWire

from .data_parallel import DataParallel
from .fleets import PacedFleet, Ports, play_fleet
from .pacing import Pacing

Kind = Literal["data_parallel", "fleet"]
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
    return _data_parallel(trial, run) if trial.kind == "data_parallel" else _fleet(trial, run)


def make_run(trial: Trial) -> RunFormat:
    """The format of the trial's run: one island per pacing, H local steps as the settings say."""
    settings = trial.settings
    islands = tuple(
        Island(f"learner-{i}", "virtual", settings.train.batch_tokens, settings.sync.every, 0.0, pacing.step_s)
        for i, pacing in enumerate(trial.pacings)
    )
    layout = make_layout(parameter_facts(build_model_on_meta(settings)), settings.sync)
    return RunFormat("trial", settings.name, "", settings, islands, layout, "trial")


class TrainedFleet:
    """A fleet that trains the run's model, with the product's own replicas, codecs, merges and outer steps.

    The learning rate's schedule ends with the last merge: `replace` gives up steps that are processed and in no merge,
    so a first fleet, which trains nothing, counts what is merged. `merges`: how many it came to; `merged` is called
    after each."""

    def __init__(
        self,
        run: RunFormat,
        pacings: tuple[Pacing, ...],
        quantum_tokens: int = 1,
        data: Data | None = None,
        merged: Callable[[TrainedFleet], None] = lambda fleet: None,
    ) -> None:
        torch.set_num_threads(1)
        budget = run.settings.train.tokens
        planned = play_fleet(run, pacings, budget, quantum_tokens).state
        train = replace(run.settings.train, tokens=max(1, planned.tokens(run.layout)))
        self.run = run = replace(run, settings=replace(run.settings, train=train))
        self.data = data if data is not None else build_data(run.settings)
        self.model, self.merges = build_model(run.settings).eval(), planned.merges
        self.played: PacedFleet

        def after(fleet: PacedFleet) -> None:
            self.played = fleet
            merged(self)

        ports = Ports(self._training, lambda name: TensorWire(run), TorchArithmetic(run), after)
        self.played = play_fleet(run, pacings, budget, quantum_tokens, ports)

    def _training(self, name: str) -> DeviceTraining:
        run, model = self.run, build_model(self.run.settings)
        return DeviceTraining(run, Replica(run.settings, model, self.data, run.shard_of(name), run.num_shards))

    def outer_parameters(self) -> dict[str, torch.Tensor]:
        """Every trained parameter by its name, after the merges so far."""
        tensors = {name: tensor.detach() for name, tensor in bare_parameters(self.model).items()}
        load_versions(self.run, self.played.state.outputs, self.played.world.store, tensors)
        return tensors

    def held_out_loss(self, num_sequences: int) -> float:
        """Of the outer parameters, nats per token, as the syncer's evaluator computes it."""
        self.outer_parameters()
        return held_out_loss(self.model, self.data, num_sequences)


def _fleet(trial: Trial, run: RunFormat) -> TrialResult:
    started_s, curve = monotonic_s(), list[tuple[int, float]]()

    def merged(fleet: TrainedFleet) -> None:
        merges = fleet.played.state.merges
        if merges in {round(fleet.merges * point / POINTS) for point in range(1, POINTS)}:
            tokens = run.settings.train.tokens * merges // fleet.merges
            curve.append((tokens, fleet.held_out_loss(trial.sequences // 4)))

    fleet = TrainedFleet(run, trial.pacings, trial.quantum_tokens, merged=merged)
    loss, played, merges = fleet.held_out_loss(trial.sequences), fleet.played, fleet.played.merges
    return TrialResult(
        loss=loss,
        curve=(*curve, (played.processed, loss)),
        processed=played.processed,
        merged=played.state.tokens(run.layout),
        merges=len(merges),
        participation=sum(len(merge.inputs) for merge in merges) / (len(merges) * len(run.islands)),
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
