"""An island with another number of ranks than the run planned for it: its batch stays, and its moments, which any
number of ranks restores; each rank computes more or fewer micro-batches, by the plan's own rule."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from diloco_cli.errors import InfeasibleError
from diloco_cli.plan.memory import USABLE, Fit
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.training.micro_batch import micro_batch_here, parameters_of


def at_ranks(run: RunFormat, island: Island, ranks: int, device: torch.device) -> Island:
    """The island as `ranks` ranks, each with such a `device`, train it. Raises InfeasibleError if they cannot, before
    anything is built."""
    if ranks == island.ranks:
        return island
    tensors, batch_tokens = parameters_of(run.layout), island.batch_tokens
    tokens, fit = micro_batch_here(run.settings, tensors, run.num_fragments, batch_tokens, device, ranks)
    if not fit.fits:
        raise InfeasibleError(_too_large(island.name, ranks, fit), hint=_what_fits(fit))
    return replace(island, ranks=ranks, micro_batch_tokens=tokens, sharding=fit.sharding)


def part_of(island: Island | None) -> str:
    """How each rank does its part, which all must do alike; empty: of an island that has yet to join."""
    return "" if island is None else f"micro-batches of {island.micro_batch_tokens} tokens ({island.sharding})"


def as_resized(island: Island, planned: Island) -> str:
    return (
        f"ranks {island.ranks}, planned were {planned.ranks}: batches of {island.batch_tokens:,} tokens as planned, in"
        f" micro-batches of {island.micro_batch_tokens:,}"
    )


def _too_large(name: str, ranks: int, fit: Fit) -> str:
    have = f"{fit.available_gb:.3g} GB, of which {100 * USABLE:.0f} % are usable"
    return f"{name} does not fit {ranks} ranks: each needs {fit.needed_gb:.3g} GB ({fit.shards}), and has {have}"


def _what_fits(fit: Fit) -> str:
    larger = f"devices with at least {math.ceil(fit.needed_gb / USABLE)} GB"
    return f"--ranks {fit.devices_needed}, or {larger}" if fit.devices_needed else larger
