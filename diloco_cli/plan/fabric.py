"""How long an island's ranks wait for sums and copies between them, beside their computing.

Ranks form a ring, and the narrowest link on it decides: of what is gathered or summed into shards each link carries
(n - 1) / n, of what is summed on all ranks twice that. As diloco's ranks train (training/ranks.py, sharding.py):

    copies (DDP)    once a step float32 gradients are summed on all ranks, during the last micro-batch's backward pass
    shards (FSDP)   in each micro-batch parameters are gathered during the forward pass; and gathered again, and float32
                    gradients summed into shards, during the backward pass

A pass takes the longer of its computing and of what travels meanwhile. The time from link to link, which grows with the
number of ranks, is not counted. A measured speed has all of it in it, and so has an `mfu` that is given without a
fabric. The catalogue's MFU is of runs on networks that hold none of them up (tests/studies/speeds.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco_cli.config.hardware import Device, Fabric
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.settings import IslandSettings
from diloco_cli.formulas import formula
from diloco_cli.plan.memory import Computing, Fit

BACKWARD_SHARE = 2 / 3  # of a step, its end: gradients appear, and can travel, during it
SUMMED_BITS = 32  # of a parameter: gradients are summed in float32
REACHED = 0.8
"""Of a link's rate, by large sums: 230 to 250 of 300 GB/s on eight A100-SXM, 35 to 45 of 63 on cards (nccl-tests, in
https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests). No island of diloco was measured."""
GIGA = 1e9
CUDA = "cuda"


@dataclass(frozen=True)
class Ring:
    """The narrowest link on it, one way, in Gbit/s; `words`: where that is known from."""

    gbps: float
    words: str


def ring_of(island: IslandSettings, device: Device) -> Ring | None:
    """None: nothing is known of it, or an island's given speed has it in it. NVLink and PCIe join the accelerators of a
    node: between nodes they are not what decides."""
    fabric = island.fabric
    if island.tokens_per_s:
        return None
    if fabric is not None and (island.nodes == 1 or fabric.kind in (None, "ethernet")):
        gbps = fabric.rate_gbps(device)
        if gbps is None:
            return None
        name = {None: "", "ethernet": "Ethernet of ", "nvlink": "NVLink of ", "pcie": "PCIe of "}[fabric.kind]
        return Ring(gbps, f"{name}{gbps:,g} Gbps")
    if island.nodes == 1 or (island.mfu and fabric is None) or device.backend != CUDA:
        return None
    if device.network_gbps is None:
        gbps = Fabric("ethernet").rate_gbps(device) or math.inf
        return Ring(gbps, f"Ethernet of {gbps:,g} Gbps between nodes, guessed")
    gbps = device.network_gbps * island.accelerators.count
    return Ring(gbps, f"a network of {gbps:,g} Gbps between nodes, as usual for {device.name}")


def share_of_computing(
    ring: Ring, fit: Fit, how: Computing, model: ModelFacts, batch_tokens: int, tokens_per_s: float
) -> float:
    """The part of their speed, `tokens_per_s`, that is left when ranks wait for each other."""
    if fit.sharding == "none":
        return 1.0
    computing_s = computing_of(batch_tokens, tokens_per_s)
    passes = math.ceil(batch_tokens / (model.sequence * fit.ranks * fit.sequences))
    if fit.sharding == "ddp":
        summed_s = sum_on_all_s(fit.ranks, model.parameters, ring.gbps)
        waiting_s = waiting_of_copies_s(summed_s, computing_s, passes)
    else:
        bits = 16 if how.half and how.gathers_half else 32
        gathered_s = gather_s(fit.ranks, model.parameters, bits, ring.gbps)
        summed_s = sum_into_shards_s(fit.ranks, model.parameters, ring.gbps)
        waiting_s = waiting_of_shards_s(gathered_s, summed_s, computing_s, passes)
    return left_beside_fabric(computing_s, waiting_s)


@formula("island", "computing of a step", "s")
def computing_of(batch_tokens: int, tokens_per_s: float) -> float:
    return batch_tokens / tokens_per_s


@formula("island", "gradients summed on all ranks (all-reduce)", "s")
def sum_on_all_s(ranks: int, parameters: int, fabric_gbps: float) -> float:
    return 2 * (ranks - 1) / ranks * parameters * SUMMED_BITS / (REACHED * fabric_gbps * GIGA)


@formula("island", "parameters gathered once (all-gather)", "s")
def gather_s(ranks: int, parameters: int, parameter_bits: int, fabric_gbps: float) -> float:
    return (ranks - 1) / ranks * parameters * parameter_bits / (REACHED * fabric_gbps * GIGA)


@formula("island", "gradients summed into shards (reduce-scatter)", "s")
def sum_into_shards_s(ranks: int, parameters: int, fabric_gbps: float) -> float:
    return (ranks - 1) / ranks * parameters * SUMMED_BITS / (REACHED * fabric_gbps * GIGA)


@formula("island", "waiting for the fabric in a step", "s")
def waiting_of_copies_s(all_reduce_s: float, computing_s: float, micro_batches: int) -> float:
    return max(0.0, all_reduce_s - BACKWARD_SHARE * computing_s / micro_batches)


@formula("island", "waiting for the fabric in a step", "s")
def waiting_of_shards_s(gather_s: float, scatter_s: float, computing_s: float, micro_batches: int) -> float:
    forward_s = max(0.0, gather_s - (1 - BACKWARD_SHARE) * computing_s / micro_batches)
    backward_s = max(0.0, gather_s + scatter_s - BACKWARD_SHARE * computing_s / micro_batches)
    return micro_batches * (forward_s + backward_s)


@formula("island", "left beside the fabric")
def left_beside_fabric(computing_s: float, waiting_s: float) -> float:
    return computing_s / (computing_s + waiting_s)
