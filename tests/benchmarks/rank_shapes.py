"""Memory of a rank of models of 1B and 8B parameters, over what the plan says: python -m tests.benchmarks.rank_shapes

The product's own sharded model on fake tensors, which have shapes and no memory, in one rank of a stand-in for a group;
torch's tracker counts what is alive. float32 (the policy of a CPU: without a device there are no fake tensors of its
streams). Two micro-batches, so that gradients are there while activations are. The optimizer's step is left out: its
fused kernel allocates nothing, and has no fake form. Exit status 1 if a row misses.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from diloco_cli.config.presets import GPTShape
from diloco_cli.config.settings import ModelSettings, RunSettings, TrainSettings
from diloco_cli.plan.memory import Computing, memory_parts
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.tasks import models
from diloco_cli.tasks.build import build_model_on_meta
from diloco_cli.training import ranked_model
from diloco_cli.training.inner import begin_moments
from diloco_cli.training.ranked_replica import RankedReplica
from diloco_cli.training.replica import CPU
from tests.benchmarks.measure import machine, row
from tests.benchmarks.rank_memory import GB, WITHIN, RandomRows

PASSES = 2
SHAPES = {
    "1B": GPTShape(layers=24, width=2048, heads=16, sequence=2048, vocabulary=32_000),
    "8B": GPTShape(layers=36, width=4096, heads=32, sequence=4096, vocabulary=128_000),
    "small": GPTShape(layers=12, width=256, heads=4, sequence=128, vocabulary=4_000),
}


@dataclass(frozen=True)
class ShapeCase:
    """`sequences`: of one rank's micro-batch."""

    shape: str
    ranks: int
    sequences: int
    checkpointing: bool = False

    def settings(self) -> RunSettings:
        shape = SHAPES[self.shape]
        model = ModelSettings(
            entrypoint="tests.benchmarks.rank_shapes:build", args={"shape": self.shape}, sequence=shape.sequence
        )
        train = TrainSettings(precision="fp32", checkpointing=self.checkpointing)
        return RunSettings(name="shapes", model=model, train=train)

    def planned_gb(self) -> float:
        """Without the exchange: what lies on every rank."""
        shape = SHAPES[self.shape]
        facts = ModelFacts(
            shape.num_parameters, shape.layers, shape.width, shape.sequence, shape.embedding_parameters,
            shape.num_tensors, 0,
        )  # fmt: skip
        how = Computing(half=False, checkpointing=self.checkpointing)
        parts = memory_parts(facts, how, self.ranks, sequences=self.sequences)
        return sum(part.gb for part in parts if part.name != "exchange")


def build(shape: str) -> nn.Module:
    return models.build(SHAPES[shape])


def measured_gb(case: ShapeCase) -> float:
    """At the peak, on one rank."""
    distributed.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    try:
        mesh = ranked_model.init_device_mesh(CPU.type, (case.ranks,))  # reads numbers, which fake tensors have not
        with patch.object(ranked_model, "init_device_mesh", return_value=mesh), FakeTensorMode():
            return _peak_bytes(case) / GB
    finally:
        distributed.destroy_process_group()


def _peak_bytes(case: ShapeCase) -> float:
    settings, sequence = case.settings(), SHAPES[case.shape].sequence
    model = ranked_model.sharded_model(build_model_on_meta(settings), settings, CPU)
    replica = RankedReplica(settings, model, RandomRows(), 0, 1, rank=0, ranks=case.ranks)
    begin_moments(replica.model, replica.optimizer, 1)
    tracker = FSDPMemTracker(replica.model, replica.optimizer)
    tracker.track_inputs(())
    with warnings.catch_warnings(), tracker:
        warnings.simplefilter("ignore")
        for _ in range(PASSES):
            tracker.reset_mod_stats()
            tokens = torch.zeros(case.sequences, sequence, dtype=torch.int64)
            replica._pass((tokens, tokens), 1 / PASSES)
    return float(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


def main() -> int:
    print(machine())
    cases = [ShapeCase("1B", 8, 1), ShapeCase("1B", 8, 4), ShapeCase("8B", 8, 1), ShapeCase("8B", 16, 1)]
    well = True
    for case in [*cases, *(replace(case, checkpointing=True) for case in cases)]:
        found, planned = measured_gb(case), case.planned_gb()
        holds = abs(found / planned - 1) <= WITHIN
        again = ", checkpointed" if case.checkpointing else ""
        print(row(f"{case.shape}, {case.ranks} ranks, {case.sequences} sequences{again}: GB", [found], "", None))
        print(row("over plan", [found / planned], f"within {WITHIN:.0%}", holds), flush=True)
        well &= holds
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
