"""Tokens a second of the built-in models' inner step on one thread, from CPU time; and AdamW as one kernel.

python -m tests.benchmarks.inner_step
"""

from __future__ import annotations

import sys

import torch

from diloco_cli.config.presets import MODEL_PRESETS, data_of
from diloco_cli.config.settings import DataSettings, InnerSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.inner import build_optimizer
from diloco_cli.training.replica import Replica
from tests.benchmarks.measure import interleaved, machine, ratios, row

PRESETS = ("gpt-pico", "gpt-nano", "gpt-micro", "moe-pico", "moe-nano", "moe-micro", "vit-nano")
BATCH_TOKENS = 1024
ROUNDS = 15


def replica_of(preset: str) -> Replica:
    run = RunSettings(
        name="bench",
        model=ModelSettings(preset=preset),
        data=DataSettings(preset=data_of(MODEL_PRESETS[preset])),
        train=TrainSettings(batch_tokens=BATCH_TOKENS, inner=InnerSettings(lr=1e-3)),
    )
    return Replica(run, build_model(run), build_data(run), 0, 1)


def measure(presets: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    """Tokens per CPU second, round by round."""
    replicas = {preset: replica_of(preset) for preset in presets}
    works = {name: lambda r=r: r.step(0, BATCH_TOKENS, 1e-3) for name, r in replicas.items()}  # type: ignore[misc]
    return {name: [BATCH_TOKENS / s for s in found] for name, found in interleaved(works, rounds).items()}


def optimizer_ratio(rounds: int) -> list[float]:
    """CPU time of one AdamW step over gpt-nano: torch's own choice over the one kernel that learners use."""
    replica = replica_of("gpt-nano")
    replica.backward(0, BATCH_TOKENS)
    groups = [{"params": group["params"]} for group in build_optimizer(replica.model, InnerSettings()).param_groups]
    plain = torch.optim.AdamW(groups, lr=1e-3)
    found = interleaved({"plain": plain.step, "fused": replica.optimizer.step}, rounds)
    return ratios(found["plain"], found["fused"])


def main() -> int:
    torch.set_num_threads(1)
    print(machine())
    for preset, rates in measure(PRESETS, ROUNDS).items():
        shape = MODEL_PRESETS[preset]
        size = f"{shape.num_parameters / 1e6:.2f} M, {shape.active_parameters / 1e6:.2f} M active"
        print(row(f"{preset} ({size}): tokens per CPU second", rates, "", None, 0))
    print(row("AdamW on gpt-nano: torch's choice / one kernel", optimizer_ratio(ROUNDS), "", None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
