"""What a larger micro-batch costs and gains on a CPU: tokens a CPU second, and peak memory over what the plan estimates
for its activations and logits (plan/memory.py rests on both).

python -m tests.benchmarks.micro_batch                    all sizes, each in a process of its own
python -m tests.benchmarks.micro_batch gpt-nano 8192      one: tokens/s and bytes
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch

from diloco_cli.config.models import MODEL_PRESETS, data_of
from diloco_cli.config.settings import DataSettings, InnerSettings, ModelSettings, RunSettings, TrainSettings
from diloco_cli.plan.memory import Computing, memory_fit, model_facts, with_micro_batch
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.training.replica import Replica
from tests.benchmarks.measure import machine, ratios, row

PRESETS = ("gpt-nano", "gpt-micro", "moe-micro")
SIZES = (1024, 4096, 8192, 16384, 32768)  # tokens
LARGEST = SIZES[-1]
BATCH_TOKENS = 32768
ROUNDS = 5
GB = 1e9


def replica_of(preset: str) -> Replica:
    run = RunSettings(
        name="bench",
        model=ModelSettings(preset=preset),
        data=DataSettings(preset=data_of(MODEL_PRESETS[preset])),
        train=TrainSettings(batch_tokens=1024, inner=InnerSettings(lr=1e-3)),
    )
    return Replica(run, build_model(run), build_data(run), 0, 1)


def measured(preset: str, micro_batch_tokens: int, batch_tokens: int = BATCH_TOKENS) -> tuple[float, float]:
    """Tokens a CPU second, and bytes at the peak beyond those before the first pass, gradients not counted."""
    torch.set_num_threads(1)
    replica = replica_of(preset)
    replica.micro_batch_tokens = micro_batch_tokens
    gradients = 4 * sum(tensor.numel() for tensor in replica.tensors.values())
    before, started_s = _peak_bytes(), time.process_time()
    replica.backward(0, batch_tokens)
    return batch_tokens / (time.process_time() - started_s), _peak_bytes() - before - gradients


def estimated(preset: str, micro_batch_tokens: int) -> float:
    """Bytes of activations and logits."""
    facts = model_facts(ModelSettings(preset=preset))
    fit = memory_fit(facts, Computing(half=False), 1, None)
    return with_micro_batch(fit, micro_batch_tokens // facts.sequence).working_gb * GB


def _peak_bytes() -> float:
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    if len(sys.argv) == 3:
        print(*measured(sys.argv[1], int(sys.argv[2])))
        return 0
    print(machine())
    for preset in PRESETS:
        rates: dict[int, list[float]] = {size: [] for size in SIZES}
        peaks: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in range(ROUNDS):
            for size in SIZES:
                words = [sys.executable, "-m", "tests.benchmarks.micro_batch", preset, str(size)]
                rate, peak = map(float, subprocess.check_output(words, text=True).split())
                rates[size].append(rate)
                peaks[size].append(peak)
        for size in SIZES:
            print(row(f"{preset}, {size:,} at once: tokens per CPU second", rates[size], "", None, 0))
            print(row(f"  over that of {LARGEST:,}", ratios(rates[size], rates[LARGEST]), "", None))
            print(row("  MB at the peak", [peak / 1e6 for peak in peaks[size]], "", None, 0))
            over = [peak / estimated(preset, size) for peak in peaks[size]]
            print(row("  over the estimate", over, "", None), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
