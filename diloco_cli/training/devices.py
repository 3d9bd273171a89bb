"""From an accelerator's name to torch's device, and the host's threads beside it."""

from __future__ import annotations

import torch

from diloco_cli.config.devices import BACKENDS, find_device
from diloco_cli.errors import UsageError
from diloco_cli.runtime.processes import usable_cores

ALLOWED = "cpu, mps, cuda, cuda:N, or the name of an NVIDIA, AMD or Apple device of the catalogue"
MOST_THREADS = 16  # codecs are bound by memory: more gain nothing


def choose_device(accelerator: str) -> torch.device:
    """By name: cpu, mps, cuda, or a device of the catalogue. Raises UsageError for another, and for one that torch
    does not see on this machine."""
    wanted = kind_of(accelerator)
    if wanted == "cpu":
        return torch.device("cpu")
    available = {"mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    if not available[wanted]:
        raise UsageError(
            f"{accelerator} needs {wanted}, which torch {torch.__version__} does not see on this machine",
            hint="run the island where the accelerator is, or give --device cpu",
        )
    if wanted == "mps":
        return torch.device("mps")
    index = accelerator.lower().partition("cuda:")[2]  # a device without an index cannot be made the current one
    return torch.device("cuda", int(index or 0))


def kind_of(accelerator: str) -> str:
    """cpu, mps or cuda, which AMD's devices are too. Raises UsageError for any other."""
    kind, _, index = accelerator.lower().partition(":")
    if kind in ("cpu", "mps", "cuda") and (not index or index.isdigit()):
        return kind
    try:
        backend = find_device(accelerator, {}).backend
    except UsageError:
        raise UsageError(
            f"no device {accelerator!r} is known here; allowed: {ALLOWED}",
            hint="a device that your inventory describes itself: start its learner with --device cuda (or cpu, mps)",
        ) from None
    if backend not in BACKENDS:
        raise UsageError(
            f"{accelerator} is one of torch's {backend} devices, on which learners do not train; allowed: {ALLOWED}",
            hint="such devices can be planned, not launched; for a trial give --device cpu",
        )
    return backend


def host_threads() -> int:
    """Threads for codecs and mixing beside an accelerator: its share of the host's cores, which it leaves idle."""
    return max(1, min(MOST_THREADS, usable_cores() // max(1, torch.cuda.device_count())))
