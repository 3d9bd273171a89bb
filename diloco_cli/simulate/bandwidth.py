"""Gbit/s that a link needs for a compute utilisation, data-parallel against decoupled (arXiv 2604.21428, table 13).

Utilisation = computing / (computing + stalls). Links serve in order (FIFO). A ring over D sites carries 2 (D - 1) / D
of every byte; through a bucket each site carries it once up and once down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco_cli.simulate.published import BANDWIDTH, UTILISATIONS

GIGA = 1e9
BACKWARD_SHARE = 2 / 3  # of a step, its end: gradients appear during it
BUCKETS = 44  # of gradients, equal ones; the published rows fit 40 to 48
GRADIENT_BITS = 16.0
PUBLISHED_PARAMETERS = 5e9
PUBLISHED_BITS = {"bf16": 16.0, "int4": 4.0}  # the published int4 rows are a quarter of bf16: no scales counted
ROUNDS = 4  # simulated; the first only fills the pipe
BISECTIONS = 40
MOST_GBPS = 1e7


@dataclass(frozen=True)
class Exchange:
    """How fragments travel: each of `fragments` equal ones once in `sync_every` steps, on its own offset, and needed
    `overlap` steps after it was sent. `hops`: links that each fragment crosses one after the other (a ring counts as
    one with its factor; a bucket as two, up and down)."""

    sync_every: int = 24
    fragments: int = 24
    overlap: int = 2
    hops: int = 1


FITTED = Exchange(sync_every=100, fragments=18)  # reproduces the published decoupled rows
HONEST = Exchange(sync_every=24, fragments=24)  # the setting that the publication names: H = P = 24


@dataclass(frozen=True)
class Row:
    """One figure. `sync_every`, `fragments`, `overlap` are 0 for data-parallel; `published_gbps` None: not printed."""

    method: str
    codec: str
    sites: int
    step_s: float
    sync_every: int
    fragments: int
    overlap: int
    utilisation_percent: float
    gbps: float
    published_gbps: float | None = None


def ring_factor(sites: int) -> float:
    """Share of the data that each link of a ring all-reduce carries."""
    return 2 * (sites - 1) / sites


def data_parallel_gbps(bits: float, sites: int, step_s: float, utilisation: float) -> float:
    """`bits`: of all gradients. A step ends when the last of the buckets, which appear evenly over the backward pass,
    has crossed the link."""
    if sites == 1:
        return 0.0
    bucket_bits = bits * ring_factor(sites) / BUCKETS

    def total_s(bps: float) -> float:
        free_s = 0.0
        for bucket in range(1, BUCKETS + 1):
            ready_s = step_s * (1 - BACKWARD_SHARE + BACKWARD_SHARE * bucket / BUCKETS)
            free_s = max(free_s, ready_s) + bucket_bits / bps
        return max(step_s, free_s)

    return _least_gbps(lambda bps: step_s / total_s(bps), utilisation)


def decoupled_gbps(bits: float, step_s: float, exchange: Exchange, utilisation: float) -> float:
    """`bits`: of all fragments together, as they cross one link."""
    return _least_gbps(lambda bps: decoupled_utilisation(bits, step_s, exchange, bps), utilisation)


def decoupled_utilisation(bits: float, step_s: float, exchange: Exchange, bps: float) -> float:
    """Steps follow each other; a fragment that is not back when it is needed stalls the next step."""
    transfer_s = bits / exchange.fragments / bps
    due = [round(p * exchange.sync_every / exchange.fragments) for p in range(exchange.fragments)]
    free_s = [0.0] * exchange.hops
    needed: dict[int, float] = {}  # by step: when the last fragment that it must wait for is back
    now_s = started_s = 0.0
    for step in range(ROUNDS * exchange.sync_every):
        if step == exchange.sync_every:
            started_s = now_s
        now_s = max(now_s, needed.pop(step, 0.0)) + step_s
        for _ in range(due.count(step % exchange.sync_every)):
            at_s = now_s
            for hop in range(exchange.hops):
                at_s = free_s[hop] = max(free_s[hop], at_s) + transfer_s
            back = step + exchange.overlap + 1
            needed[back] = max(needed.get(back, 0.0), at_s)
    return (ROUNDS - 1) * exchange.sync_every * step_s / (now_s - started_s)


def published_rows() -> list[Row]:
    """The published table: data-parallel, decoupled with the setting that reproduces it, and with H = P = 24."""
    rows = []
    for block in BANDWIDTH:
        rows += _data_parallel_rows(PUBLISHED_PARAMETERS, block.sites, block.step_s, block.data_parallel)
        for exchange in (FITTED, HONEST):
            for codec, printed in (("bf16", block.bf16), ("int4", block.int4)):
                bits = PUBLISHED_PARAMETERS * PUBLISHED_BITS[codec] * ring_factor(block.sites)
                beside = printed if exchange is FITTED else None
                rows += decoupled_rows(bits, codec, block.sites, block.step_s, exchange, beside)
    return rows


def rows_of(parameters: float, sites: int, step_s: float, exchange: Exchange, bits_of: dict[str, float]) -> list[Row]:
    """Any model. `bits_of`: bits per parameter by codec."""
    rows = _data_parallel_rows(parameters, sites, step_s, None)
    factor = ring_factor(sites) if exchange.hops == 1 else 1.0
    for codec, bits in bits_of.items():
        rows += decoupled_rows(parameters * bits * factor, codec, sites, step_s, exchange, None)
    return rows


def _data_parallel_rows(parameters: float, sites: int, step_s: float, printed: tuple[float, ...] | None) -> list[Row]:
    made = []
    for index, percent in enumerate(UTILISATIONS):
        gbps = data_parallel_gbps(parameters * GRADIENT_BITS, sites, step_s, percent / 100)
        row = Row("data_parallel", "bf16", sites, step_s, 0, 0, 0, float(percent), gbps)
        made.append(replace(row, published_gbps=printed[index] if printed else None))
    return made


def decoupled_rows(
    bits: float, codec: str, sites: int, step_s: float, exchange: Exchange, printed: tuple[float, ...] | None
) -> list[Row]:
    made = []
    for index, percent in enumerate(UTILISATIONS):
        gbps = decoupled_gbps(bits, step_s, exchange, percent / 100)
        every, fragments, overlap = exchange.sync_every, exchange.fragments, exchange.overlap
        row = Row("decoupled", codec, sites, step_s, every, fragments, overlap, float(percent), gbps)
        made.append(replace(row, published_gbps=printed[index] if printed else None))
    return made


def _least_gbps(utilisation_at: Callable[[float], float], wanted: float) -> float:
    """By bisection on a logarithmic scale: more bandwidth never means less utilisation."""
    low, high = 1e-9, MOST_GBPS
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if utilisation_at(middle * GIGA) >= wanted else (middle, high)
    return high
