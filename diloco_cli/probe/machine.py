"""The facts of this machine, and its speed of matrix products: 2 n^3 operations over the time they take."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil
import torch

from diloco_cli.clock import monotonic_s
from diloco_cli.config.devices import CPU, MPS, in_catalogue
from diloco_cli.config.settings import Accelerators
from diloco_cli.probe.spread import Spread, spread_of
from diloco_cli.runtime.kernel import usable_cores
from diloco_cli.training.inner import runs_in_bf16

GB = 1e9
VENDORS = re.compile(r"^(?:(?:NVIDIA|Tesla|Quadro|GeForce|AMD|Instinct|Radeon)[ -]+)+", re.IGNORECASE)
PACKAGING = re.compile(r"-OAM$", re.IGNORECASE)
SIDES = {"cpu": 1024, "mps": 4096, "cuda": 8192}
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REPEATS = 5
TERA = 1e12


@dataclass(frozen=True)
class MachineFacts:
    """`known`: the catalogue has this device. `memory_gb` is of one accelerator, None where it is the host's."""

    accelerators: Accelerators
    known: bool
    memory_gb: float | None
    cores: int
    host_memory_gb: float
    torch_device: str


def machine_facts() -> MachineFacts:
    """The best accelerators that torch finds: CUDA (or ROCm) devices, else Apple's, else the cores."""
    host_memory_gb = psutil.virtual_memory().total / GB
    cores = usable_cores()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name = device_name(properties.name)
        found = in_catalogue(name)
        accelerators = Accelerators(found.name if found else name, torch.cuda.device_count())
        memory_gb = properties.total_memory / GB
        return MachineFacts(accelerators, found is not None, memory_gb, cores, host_memory_gb, "cuda:0")
    if torch.backends.mps.is_available():
        return MachineFacts(Accelerators(MPS, 1), True, None, cores, host_memory_gb, "mps")
    return MachineFacts(Accelerators(CPU, 1), True, None, cores, host_memory_gb, "cpu")


def device_name(driver_name: str) -> str:
    """`NVIDIA GeForce RTX 4090` -> RTX-4090: one word without the vendor; the catalogue's aliases match the rest."""
    return PACKAGING.sub("", VENDORS.sub("", driver_name.strip()).replace(" ", "-")) or "accelerator"


def training_types(device: str) -> list[str]:
    """The types in which a learner can compute there, the faster one first: no bf16 where it would be emulated."""
    emulated = torch.device(device).type == "cuda" and not runs_in_bf16("auto", torch.device(device))
    return [kind for kind in TYPES if kind != "bf16" or not emulated]


def matrix_tflops(kind: str, device: str, seconds: float) -> Spread | None:
    """TFLOP/s of an n x n product in the type `kind` on one device (one thread of a CPU); None if it cannot do it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _tflops(kind, torch.device(device), seconds / REPEATS)
    except RuntimeError:  # torch raises it if the type is not implemented on this device
        return None
    finally:
        torch.set_num_threads(threads)


def _tflops(kind: str, device: torch.device, seconds: float) -> Spread:
    side = SIDES[device.type]
    left = torch.ones(side, side, dtype=TYPES[kind], device=device) / side
    right, product = left.clone(), torch.empty_like(left)
    _multiply(left, right, product, 0.0)  # the first one also finds the kernel
    return spread_of([_multiply(left, right, product, seconds) for _ in range(REPEATS)])


def _multiply(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, seconds: float) -> float:
    """TFLOP/s over at least one product."""
    done, started_s = 0, monotonic_s()
    while not done or monotonic_s() - started_s < seconds:
        torch.mm(left, right, out=product)
        done += 1
        _wait_for(product)
    return 2.0 * left.shape[0] ** 3 * done / (monotonic_s() - started_s) / TERA


def _wait_for(product: torch.Tensor) -> None:
    """Accelerators work asynchronously: reading a number waits for them."""
    product[0, 0].item()
