"""The speed that plans guess, beside that of published training runs: python -m tests.studies.speeds

Each row of speeds.csv is one run in print: device, number, model, batch of a device, vocabulary (of Llama 3, which
plain numbers mistake without it), whether the backward pass computed activations again, whether kernels were compiled
or fused, tokens/s of a device, and where it was read. Two thirds of the rows set `mfu` in
diloco_cli/config/devices.yaml (the median of a device's rows); every third row is only compared.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from diloco_cli.config.hardware import Accelerators, find_device
from diloco_cli.config.models import ModelFacts, facts_from_numbers
from diloco_cli.config.settings import (
    Inventory,
    IslandSettings,
    ModelSettings,
    RunSettings,
    StoreSettings,
    TrainSettings,
)
from diloco_cli.plan.candidates import RECOMPUTING, UNCOMPILED, Candidate, candidates, share_of_size

ROWS = Path(__file__).with_name("speeds.csv")
CLOSE = 0.25


@dataclass(frozen=True)
class PublishedRun:
    """`tokens_per_s`: of one device."""

    device: str
    devices: int
    parameters: int
    layers: int
    width: int
    sequence: int
    batch: int
    vocabulary: int | None
    recomputing: bool
    compiled: bool
    tokens_per_s: float
    source: str
    fitted: bool

    @property
    def model(self) -> ModelFacts:
        return facts_from_numbers(self.parameters, self.layers, self.width, self.sequence, self.vocabulary)

    def planned(self) -> Candidate:
        """As an island of a plan, in nodes of eight."""
        nodes = max(1, self.devices // 8)
        accelerators = Accelerators(self.device, self.devices // nodes)
        batch = self.batch * self.sequence * self.devices
        numbers = ModelSettings(
            parameters=self.parameters, layers=self.layers, width=self.width, sequence=self.sequence
        )
        train = TrainSettings(10**12, batch_tokens=batch, checkpointing=self.recomputing, compile=self.compiled)
        island = IslandSettings("i", "here", accelerators, nodes=nodes, infra="slurm/p", batch_tokens=batch)
        inventory = Inventory(StoreSettings("gs://bucket"), (island,))
        return candidates(RunSettings("published", model=numbers, train=train), inventory, self.model)[0]

    def mfu(self) -> float:
        """Of a model so large that its size takes nothing, compiled, without recomputing: the catalogue's figure."""
        tflops = find_device(self.device, {}).bf16_tflops or 0.0
        less = (RECOMPUTING if self.recomputing else 1.0) * (1.0 if self.compiled else UNCOMPILED)
        flops = self.tokens_per_s * self.model.flops_per_token
        return flops / (tflops * 1e12) / less / share_of_size(self.parameters, tflops)


@dataclass(frozen=True)
class SpeedRow:
    run: PublishedRun
    ratio: float
    fits: bool


def published() -> list[PublishedRun]:
    with ROWS.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    return [
        PublishedRun(
            row["device"],
            *(int(row[key]) for key in ("devices", "parameters", "layers", "width", "sequence", "batch")),
            vocabulary=int(row["vocabulary"]) if row["vocabulary"] else None,
            recomputing=row["recomputing"] == "yes",
            compiled=row["compiled"] == "yes",
            tokens_per_s=float(row["tokens_per_s"]),
            source=row["source"],
            fitted=number % 3 != 2,
        )
        for number, row in enumerate(rows)
    ]


def compared(runs: Sequence[PublishedRun]) -> list[SpeedRow]:
    found = [(run, run.planned()) for run in runs]
    return [SpeedRow(run, c.tokens_per_s / run.devices / run.tokens_per_s, could_fit(c)) for run, c in found]


def could_fit(found: Candidate) -> bool:
    """With a number of fragments that the search may choose."""
    return found.fit.fits or any(way.startswith("sync.fragments=") for way in found.fit.settings)


def close(rows: Sequence[SpeedRow]) -> float:
    """The share within a quarter."""
    return sum(abs(row.ratio - 1) <= CLOSE for row in rows) / len(rows)


def main() -> None:
    rows = compared(published())
    for row in rows:
        run = row.run
        how = "again " * run.recomputing + "eager " * (not run.compiled)
        judged = "no fit " * (not row.fits) + "held out" * (not run.fitted)
        print(
            f"{run.device:<14} x {run.devices:<4} {run.parameters / 1e9:>7.3f}B S {run.sequence:<5} {how:<12}"
            f" {run.tokens_per_s:>9,.0f} tokens/s, planned x {row.ratio:.2f}, mfu {run.mfu():.2f} {judged}"
        )
    for device in dict.fromkeys(row.run.device for row in rows):
        found = [row.run.mfu() for row in rows if row.run.device == device and row.run.fitted]
        print(f"{device}: mfu {median(found):.3f} of {len(found)} rows" if found else f"{device}: none fitted")
    for name, some in (
        ("fitted", [r for r in rows if r.run.fitted]),
        ("held out", [r for r in rows if not r.run.fitted]),
    ):
        print(
            f"{name}: {len(some)} runs, {100 * close(some):.0f} % within {100 * CLOSE:.0f} %,"
            f" from x {min(r.ratio for r in some):.2f} to x {max(r.ratio for r in some):.2f},"
            f" {sum(not r.fits for r in some)} do not fit"
        )


if __name__ == "__main__":
    main()
