"""What this machine is: its accelerators by the catalogue's names, its cores, its memory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import psutil
import torch

from diloco_cli.config.devices import CPU, MPS, in_catalogue
from diloco_cli.config.settings import Accelerators

GB = 1e9
VENDORS = re.compile(r"^(?:(?:NVIDIA|Tesla|Quadro|GeForce|AMD|Instinct|Radeon)[ -]+)+", re.IGNORECASE)
PACKAGING = re.compile(r"-OAM$", re.IGNORECASE)


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
    """The best accelerators that torch sees: CUDA (or ROCm) devices, else Apple's, else the cores."""
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


def usable_cores() -> int:
    """The cores that this process may use, where the system tells (Linux)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_name(driver_name: str) -> str:
    """`NVIDIA GeForce RTX 4090` -> RTX-4090: the vendor away, one word; the catalogue's aliases do the rest."""
    return PACKAGING.sub("", VENDORS.sub("", driver_name.strip()).replace(" ", "-")) or "accelerator"
