"""What the ranks of an island hold at the peak, over what the plan says: python -m tests.benchmarks.rank_memory

Real ranks (gloo, on the CPU) train through the product's own code while rank 0 holds what was sent and what arrived of
the largest fragment; with --host it also holds what an island's host has for the exchange: every base, two rounding
errors a fragment, and saved moments with their bytes. Resident memory above that of the same process after a tiny
model's step. Every rank adds up two micro-batches, so that gradients are there while activations are. Memory that is
freed goes back to the system at once (MALLOC_MMAP_THRESHOLD_): malloc keeps nothing that could be taken for the
model's. Exit status 1 if a row misses.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from diloco_cli.clock import utc_now_text
from diloco_cli.config.presets import GPTShape, MoEShape
from diloco_cli.config.settings import (
    DataSettings,
    InnerSettings,
    ModelSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.environment import environment_with
from diloco_cli.launch.new_run import layout_of
from diloco_cli.learner.group import join_group
from diloco_cli.learner.parent import RankPlace, own_beats, place_here
from diloco_cli.plan.memory import Computing, host_memory_gb, memory_parts
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.protocol.actors.ports import Progression
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.tasks import models
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.inner import begin_moments
from diloco_cli.training.ranks import RankedTraining, build_rank, follow
from diloco_cli.training.replica import CPU, DeviceTraining, Replica
from diloco_cli.training.wire import TensorWire
from tests.benchmarks.measure import ROOT, machine, row

SEQUENCE, PASSES, FRAGMENTS = 128, 2, 8
WITHIN = 0.15
GB = 1e9
SHAPES: dict[str, GPTShape] = {
    "dense": GPTShape(layers=64, width=256, heads=4, sequence=SEQUENCE),
    "moe": MoEShape(layers=36, width=256, heads=4, sequence=SEQUENCE, experts=8, active_experts=2, expert_width=512),
    "wide": GPTShape(layers=8, width=512, heads=8, sequence=SEQUENCE),
    "small": GPTShape(layers=24, width=128, heads=4, sequence=SEQUENCE),
    "tiny": GPTShape(layers=1, width=64, heads=4, sequence=SEQUENCE),
}


@dataclass(frozen=True)
class MemoryCase:
    """`sequences`: of one rank's micro-batch. `host`: rank 0 holds what its host has for the exchange, too."""

    shape: str
    ranks: int
    sequences: int
    sharding: str = "fsdp"
    fragments: int = FRAGMENTS
    host: bool = False

    @property
    def batch_tokens(self) -> int:
        return PASSES * self.ranks * self.sequences * SEQUENCE

    def sync(self) -> SyncSettings:
        return SyncSettings(fragments=self.fragments, codec="int4", error_feedback=self.host)

    def run(self) -> RunFormat:
        settings = RunSettings(
            name="memory",
            model=ModelSettings(entrypoint=f"tests.benchmarks.rank_memory:{self.shape}", sequence=SEQUENCE),
            data=DataSettings(entrypoint="tests.benchmarks.rank_memory:RandomRows"),
            train=TrainSettings(batch_tokens=self.batch_tokens, precision="fp32", inner=InnerSettings(warmup_steps=0)),
            sync=self.sync(),
        )
        island = Island(
            "l0", "here", self.batch_tokens, self.fragments, 1.0, 1.0, micro_batch_tokens=self.sequences * SEQUENCE,
            sharding=self.sharding if self.ranks > 1 else "none",  # type: ignore[arg-type]
        )  # fmt: skip
        return RunFormat("id", "memory", utc_now_text(), settings, (island,), layout_of(settings), "test")

    def planned(self) -> list[float]:
        """GB of each rank."""
        shape = SHAPES[self.shape]
        facts = ModelFacts(
            shape.num_parameters, shape.layers, shape.width, shape.sequence, shape.embedding_parameters,
            shape.num_tensors, shape.num_parameters - shape.active_parameters,
        )  # fmt: skip
        over = self.ranks if self.sharding == "fsdp" else 1
        parts = memory_parts(facts, Computing(half=False, num_fragments=self.fragments), over, sequences=self.sequences)
        each = sum(part.gb for part in parts if part.name != "exchange")
        commanding = sum(part.gb for part in parts)
        if self.host:
            commanding = each + host_memory_gb(facts, self.sync(), facts.max_fragment(self.fragments), overlap=0)
        return [commanding, *(each for _ in range(1, self.ranks))]


class RandomRows:
    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(position)
        tokens = torch.randint(0, 256, (batch_tokens // SEQUENCE, SEQUENCE + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def held_out(self, num_sequences: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return []


def dense() -> nn.Module:
    return models.build(SHAPES["dense"])


def moe() -> nn.Module:
    return models.build(SHAPES["moe"])


def small() -> nn.Module:
    return models.build(SHAPES["small"])


def wide() -> nn.Module:
    return models.build(SHAPES["wide"])


def tiny() -> nn.Module:
    return models.build(SHAPES["tiny"])


def measured(case: MemoryCase) -> list[float]:
    """GB of each rank above its baseline, at the peak."""
    with tempfile.TemporaryDirectory() as name:
        code = f"from tests.benchmarks.rank_memory import rank; rank({json.dumps(asdict(case))!r}, {name!r})"
        processes(code, case.ranks, Path(name))
        return [float((Path(name) / str(rank)).read_text()) for rank in range(case.ranks)]


def processes(code: str, ranks: int, folder: Path) -> None:
    """Run `code` in each of the ranks, one thread each, to its end."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    children = []
    for rank in range(ranks):
        if ranks > 1:
            variables |= RankPlace(rank, ranks, rank, ranks, f"file://{folder}/meet").environment()
        environment = environment_with(**variables)
        children.append(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment))
    try:
        codes = [child.wait(600) for child in children]
    finally:
        for child in children:
            child.kill()
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


def rank(case: str, folder: str) -> None:
    """One of the ranks, in a process of its own."""
    wanted, place = MemoryCase(**json.loads(case)), place_here()
    if place is not None:
        join_group(place, CPU)
    _peak_bytes(MemoryCase("tiny", wanted.ranks, 1, wanted.sharding), place)
    gc.collect()
    before = _resident_bytes("VmRSS")
    grown = _peak_bytes(wanted, place) - before
    (Path(folder) / str(0 if place is None else place.rank)).write_text(str(grown / GB))


def _peak_bytes(case: MemoryCase, place: RankPlace | None) -> float:
    run = case.run()
    island, data = run.islands[0], build_data(run.settings)
    if place is None:
        replica = Replica(
            run.settings, build_model(run.settings), data, 0, 1, micro_batch_tokens=island.micro_batch_tokens
        )
        return _trained(case, DeviceTraining(run, replica))
    built = build_rank(run, island, data, CPU, own_beats(place))
    if place.commands:
        training = RankedTraining(run, built)
        peak = _trained(case, training)
        training.close(0)
        return peak
    _begin(built.replica)
    follow(built)
    return _resident_bytes("VmHWM")


def _begin(replica: Replica) -> None:
    begin_moments(replica.model, replica.optimizer, 1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew


def _trained(case: MemoryCase, training: DeviceTraining) -> float:
    _begin(training.replica)
    layout = training.run.layout
    largest = max(range(len(layout.fragments)), key=lambda fragment: layout.fragments[fragment].num_parameters)
    for fragment in range(len(layout.fragments)):
        training.write(fragment, 0.02 * torch.randn(layout.fragments[fragment].num_parameters))
    on_host = _held_on_host(training) if case.host else None
    sent = training.read(largest)
    arrived = sent.clone()
    training.train(0, case.batch_tokens, Progression(0.5, 1, False))
    training.write(largest, torch.lerp(arrived, sent, 0.5))
    del on_host  # it was there until now
    return _resident_bytes("VmHWM")


def _held_on_host(training: DeviceTraining) -> tuple[object, ...]:
    """As in the middle of a run: two rounding errors of each fragment, and moments that are being saved."""
    wire = TensorWire(training.run)
    bases = [training.read(fragment) + 0.01 for fragment in range(training.run.num_fragments)]
    for seq in range(2):
        for fragment, base in enumerate(bases):
            wire.encode(fragment, seq, 0 if seq else None, base, training.read(fragment))
    moments = training.save()
    assert moments is not None
    return wire, bases, moments, moments.encode()


def _resident_bytes(which: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["dense", "moe"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--sequences", nargs="+", type=int, default=[8, 12, 16], help="of a rank's micro-batch")
    parser.add_argument("--sharding", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument("--host", action="store_true", help="with what rank 0's host has for the exchange")
    options = parser.parse_args()
    print(machine())
    well = True
    for shape in options.shapes:
        for ranks in options.ranks:
            for sequences in options.sequences:
                case = MemoryCase(shape, ranks, sequences, options.sharding, host=options.host)
                found, planned = measured(case), case.planned()
                over = [a / b for a, b in zip(found, planned, strict=True)]
                holds = all(abs(ratio - 1) <= WITHIN for ratio in over)
                name = f"{shape}, {ranks} ranks, {sequences} sequences: GB of each; over plan"
                print(row(name, found, "", None))
                print(row("", over, f"within {WITHIN:.0%}", holds), flush=True)
                well &= holds
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
