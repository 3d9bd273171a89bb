"""The achievable matrix product: 2 n^3 operations over the time they take, repeated for a few seconds."""

from __future__ import annotations

import torch

from diloco_cli.clock import monotonic_s
from diloco_cli.probe.spread import Spread, spread_of

SIDES = {"cpu": 1024, "mps": 4096, "cuda": 8192}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REPEATS = 5
TERA = 1e12


def matrix_tflops(kind: str, device: str, seconds: float) -> Spread | None:
    """TFLOP/s of an n x n product in the type `kind` on one device (one thread of a CPU); None if it cannot do it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _tflops(kind, torch.device(device), seconds / REPEATS)
    except RuntimeError:  # torch's word for "not implemented for this type here"
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
    """Accelerators work behind one's back: reading a number waits for them."""
    product[0, 0].item()
