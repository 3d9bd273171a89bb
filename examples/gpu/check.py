"""One line a check of what an island does on a GPU: `ok`, `FAILED` or `skipped`, and why. Called by check.sh."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from diloco_cli.config.codec import replace
from diloco_cli.config.models import MODEL_PRESETS
from diloco_cli.config.settings import DataSettings, ModelSettings, RunSettings, SyncSettings, TrainSettings
from diloco_cli.layout import make_layout
from diloco_cli.plan.memory import computing, fit_with_micro_batch, model_facts
from diloco_cli.protocol.actors.learner import Fragments
from diloco_cli.protocol.log.records import FragmentVersion, Island, RunFormat
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tensors.codecs import codec
from diloco_cli.tensors.flat import parameter_facts
from diloco_cli.tensors.merge import WeightsFormat
from diloco_cli.training.devices import CudaTraining, CudaWire
from diloco_cli.training.replica import Prefetched, Replica

ROOT = Path(__file__).resolve().parents[2]
PRESET, SEQUENCES, STEPS = "gpt-small", 8, 12
BATCH = SEQUENCES * MODEL_PRESETS[PRESET].sequence
BLOCKED, MEMORY, LOSSES = 0.01, 0.15, 0.02  # what the checks allow


class Skipped(Exception):
    """What is missing here."""


def settings_of(**train: Any) -> RunSettings:
    return RunSettings(
        name="gpu",
        model=ModelSettings(preset=PRESET),
        data=DataSettings(preset="python-stdlib"),
        train=replace(TrainSettings(batch_tokens=BATCH), **train),
        sync=SyncSettings(every=STEPS, fragments=4, mixing="rebase"),
    )


def replica_of(**train: Any) -> Replica:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    settings, device = settings_of(**train), torch.device("cuda")
    return Replica(
        settings, build_model(settings).to(device), Prefetched(build_data(settings), device), 0, 1, device, BATCH
    )


def trained(replica: Replica) -> tuple[list[float], float]:
    """The losses of some steps, and the seconds of one after the first two."""
    losses = []
    for step in range(STEPS):
        if step == 2:
            torch.cuda.synchronize()
            started_s = perf_counter()
        losses.append(replica.step(step * BATCH, BATCH, 1e-4))
    torch.cuda.synchronize()
    return losses, (perf_counter() - started_s) / (STEPS - 2)


def tested(*selection: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *selection]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout.strip().splitlines()[-1]


def exact() -> str:
    """Fragments, deltas, adoption and moments as on a CPU, bit for bit."""
    return tested("tests/unit/training/test_devices.py", "-k", "cuda and not waits_for_the_device")


def one_wait() -> str:
    """Waits for the device in a step, counted by torch."""
    return tested("tests/unit/training/test_devices.py", "-k", "waits_for_the_device")


def blocked() -> str:
    """The share of the time in which the training thread sends and adopts instead of ordering steps."""
    replica = replica_of()
    layout = make_layout(parameter_facts(replica.model), replica.settings.sync)
    island = Island("gpu", "here", BATCH, STEPS, 1.0, 1.0, accelerator="cuda")
    run = RunFormat("id", "gpu", "", replica.settings, (island,), layout, "")
    trained(replica)
    share = away_share(run, CudaTraining(run, replica), CudaWire(run, replica.device))
    assert share <= BLOCKED, f"{100 * share:.2f} % of the time"
    return f"{100 * share:.2f} % of the time, with an exchange every 3 steps"


def away_share(run: RunFormat, training: CudaTraining, wire: CudaWire) -> float:
    """With exchanges far more often than a run has them."""
    fragments, weights_codec = Fragments(training, wire), codec(run.settings.sync.weights_codec)
    versions = [
        WeightsFormat(weights_codec, f).to_bytes({"parameters": torch.zeros(f.num_parameters)})
        for f in run.layout.fragments
    ]

    def version(fragment: int) -> Any:
        return wire.decode(FragmentVersion(fragment, 1, 0, 1, "", ""), versions[fragment])

    for fragment in range(len(versions)):
        fragments.begin(fragment, version(fragment))
    batch_tokens, replica = run.islands[0].batch_tokens, training.replica
    away_s, started_s, lanes = 0.0, perf_counter(), []
    for step in range(4 * STEPS):
        if step % 3 == 0:
            fragment = step // 3 % len(versions)
            arrived = version(fragment)  # a follower's work
            before_s = perf_counter()
            base, values = fragments.bases[fragment], fragments.send(fragment, step, keep=True)
            fragments.adopt(fragment, arrived, "rebase", None)
            away_s += perf_counter() - before_s
            lanes.append(threading.Thread(target=wire.encode, args=(fragment, step, None, base, values)))
            lanes[-1].start()
        replica.step(step * batch_tokens, batch_tokens, 1e-4)
    share = away_s / (perf_counter() - started_s)
    for lane in lanes:
        lane.join()
    return share


def memory() -> str:
    """The peak of training against the plan's parts, without those of the exchange."""
    found = []
    for checkpointing in (False, True):
        replica = replica_of(checkpointing=checkpointing)
        trained(replica)
        peak_gb = torch.cuda.max_memory_allocated() / 1e9
        found.append((peak_gb, planned_gb(replica.settings)))
        del replica
    said = "; ".join(f"{peak:.2f} GB, planned {planned:.2f}" for peak, planned in found)
    assert all(abs(peak / planned - 1) <= MEMORY for peak, planned in found), said
    return f"{said} (the second with checkpointing)"


def planned_gb(settings: RunSettings) -> float:
    train, model = replace(settings.train, micro_batch_tokens=BATCH), model_facts(settings.model)
    how = computing(replace(settings, train=train), model, half=True, num_fragments=4, own_memory=True)
    fit = fit_with_micro_batch(train, model, BATCH, how)
    return sum(part.gb for part in fit.parts if part.name != "exchange")


def checkpointing() -> str:
    (plain, plain_s), (again, again_s) = (trained(replica_of(checkpointing=on)) for on in (False, True))
    assert max(abs(a - b) for a, b in zip(plain, again, strict=True)) <= LOSSES, f"{plain} {again}"
    return f"the same losses; a step takes {again_s / plain_s:.2f} times as long"


def compiled() -> str:
    (plain, plain_s), (fast, fast_s) = (trained(replica_of(compile=on)) for on in (False, True))
    assert max(abs(a - b) for a, b in zip(plain, fast, strict=True)) <= LOSSES, f"{plain} {fast}"
    return f"the same losses within {LOSSES}; a step takes {fast_s / plain_s:.2f} times as long"


def launched(count: int, sharding: str) -> str:
    """An island of as many GPUs through `diloco launch`, to its end."""
    if torch.cuda.device_count() < count:
        raise Skipped(f"{torch.cuda.device_count()} GPU here, {count} needed")
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "run.yaml").write_text(
            "version: 1\nname: gpu-ranks\ninventory: inventory.yaml\nmodel: {preset: gpt-micro}\n"
            "data: {preset: python-stdlib}\n"
            f"train: {{tokens: 2M, batch_tokens: 16384, sharding: {sharding}}}\nsync: {{fragments: 4, every: 8}}\n"
        )
        (at / "inventory.yaml").write_text(
            "version: 1\nstore: {url: bucket, region: here}\n"
            "devices: {cuda: {backend: cuda, bf16_tflops: 100, memory_gb: 16}}\n"
            f"islands:\n  - {{name: gpus, region: here, accelerators: 'cuda:{count}', tokens_per_s: 100000}}\n"
        )
        command = [sys.executable, "-m", "diloco_cli", "launch", str(at / "run.yaml")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return f"an island of {count} launched with `diloco launch` trained to its end"


CHECKS: dict[str, Callable[[], str]] = {
    "one device is exact": exact,
    "one wait a step": one_wait,
    "blocked share": blocked,
    "memory as planned": memory,
    "checkpointing": checkpointing,
    "compile": compiled,
    "one GPU launched": lambda: launched(1, "auto"),
    "two ranks, copies": lambda: launched(2, "ddp"),
    "two ranks, sharded": lambda: launched(2, "fsdp"),
}


def verdict(check: Callable[[], str]) -> tuple[str, bool]:
    if not torch.cuda.is_available():
        return f"skipped: torch {torch.__version__} sees no CUDA device here", True
    try:
        return f"ok: {check()}", True
    except Skipped as reason:
        return f"skipped: {reason}", True
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}", False


if __name__ == "__main__":
    passed = True
    for name, check in CHECKS.items():
        said, well = verdict(check)
        print(f"{name:20} {said}", flush=True)
        passed &= well
    sys.exit(0 if passed else 1)
