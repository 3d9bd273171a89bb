"""Gbit/s that a link needs for a compute utilisation, data-parallel against decoupled (arXiv 2604.21428, table 13).

Utilisation = computing / (computing + stalls), in steady state: a round's bits must cross a link within a round, so no
row is below utilisation x bits / (H x step). Links serve in order (FIFO). A ring over D sites carries
2 (D - 1) / D of every byte; through a bucket each site carries it once up and once down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from diloco_cli.plan.candidates import BACKWARD_SHARE
from diloco_cli.plan.flow import GRADIENT_BITS, fragment_offsets

GIGA = 1e9
BUCKETS = 44  # of gradients, equal ones; the published rows fit 40 to 48
PUBLISHED_PARAMETERS = 5e9
PUBLISHED_BITS = {"bf16": 16.0, "int4": 4.0}  # the published int4 rows are a quarter of bf16: no scales counted
ROUNDS = 100  # that may be late before the links count as too slow; a handful is usual
TOLERANCE = 1e-9  # of a round
BISECTIONS = 30


UTILISATIONS = (50, 75, 90, 95, 99)


@dataclass(frozen=True)
class PublishedBandwidth:
    """Gbit/s by `UTILISATIONS` for a model of 5B parameters."""

    step_s: float
    sites: int
    data_parallel: tuple[float, ...]
    bf16: tuple[float, ...]
    int4: tuple[float, ...]


BANDWIDTH = (
    PublishedBandwidth(1.0, 2, (49, 81, 104, 113, 195), (0.58, 1.2, 1.7, 1.9, 2.2), (0.15, 0.29, 0.43, 0.49, 0.53)),
    PublishedBandwidth(5.0, 2, (9.5, 16, 21, 23, 49), (0.12, 0.23, 0.34, 0.39, 0.43), (0.03, 0.06, 0.08, 0.10, 0.11)),
    PublishedBandwidth(1.0, 8, (85, 140, 183, 198, 391), (1.0, 2.0, 3.0, 3.3, 3.8), (0.26, 0.51, 0.75, 0.84, 0.94)),
    PublishedBandwidth(5.0, 8, (17, 28, 37, 40, 49), (0.21, 0.40, 0.59, 0.68, 0.75), (0.05, 0.10, 0.15, 0.17, 0.19)),
)


@dataclass(frozen=True)
class Exchange:
    """How fragments, which are equal, travel over a link: each once in `sync_every` steps, on its own offset, and
    needed `overlap` steps after it was sent."""

    sync_every: int = 24
    fragments: int = 24
    overlap: int = 2


FITTED = Exchange(sync_every=100, fragments=18)  # reproduces the published decoupled rows
HONEST = Exchange(sync_every=24, fragments=24)  # the setting that the publication names: H = P = 24


@dataclass(frozen=True)
class BandwidthRow:
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
    has crossed the link: between each one's appearance and the end, it and all that follow cross."""
    bucket_bits = bits * ring_factor(sites) / BUCKETS

    def needed_bps(bucket: int) -> float:
        ready_s = step_s * (1 - BACKWARD_SHARE + BACKWARD_SHARE * (bucket + 1) / BUCKETS)
        return (BUCKETS - bucket) * bucket_bits / (step_s / utilisation - ready_s)

    return max(map(needed_bps, range(BUCKETS))) / GIGA


def decoupled_gbps(bits: float, step_s: float, exchange: Exchange, utilisation: float) -> float:
    """`bits`: of all fragments together, as they cross one link."""
    return bits / max_busy_s(step_s, exchange, utilisation) / GIGA


@lru_cache(maxsize=64)
def max_busy_s(step_s: float, exchange: Exchange, utilisation: float) -> float:
    """Seconds of a round that all fragments together may take on a link, equal for all links: at most the whole round,
    at least the stalls. `utilisation` is below 1."""
    round_s = exchange.sync_every * step_s / utilisation
    moments = sorted(_moments(exchange))
    if _keeps_up(exchange, moments, step_s, round_s, round_s):
        return round_s
    low_s, high_s = round_s - exchange.sync_every * step_s, round_s
    for _ in range(BISECTIONS):
        busy_s = (low_s + high_s) / 2
        fine = _keeps_up(exchange, moments, step_s, round_s, busy_s)
        low_s, high_s = (busy_s, high_s) if fine else (low_s, busy_s)
    return low_s


class _Moment(NamedTuple):
    """A time in a round, after a number of its steps: a fragment is sent, or one sent `rounds_ago` is waited for."""

    steps: int
    waits: bool
    fragment: int
    rounds_ago: int


def _moments(exchange: Exchange) -> Iterator[_Moment]:
    """All moments of a round, in any order. `overlap` steps after a fragment was sent, the next step waits for it."""
    for fragment, sent in enumerate(fragment_offsets(exchange.sync_every, exchange.fragments)):
        yield _Moment(sent, False, fragment, 0)
        rounds, steps = divmod(sent + exchange.overlap, exchange.sync_every)
        yield _Moment(steps, True, fragment, rounds)


def _keeps_up(exchange: Exchange, moments: list[_Moment], step_s: float, round_s: float, busy_s: float) -> bool:
    """Whether rounds that begin every `round_s`, none earlier, never end late, until the fragments in flight repeat. If
    rounds began as soon as possible, links would first fall behind by the whole overlap, which may take many rounds,
    and a link that is too slow would look fast enough until then."""
    takes_s = busy_s / exchange.fragments
    slack_s = TOLERANCE * round_s
    free_s, back_s = -inf, [-inf] * exchange.fragments  # seconds after the round's beginning
    for _ in range(ROUNDS):
        before = [free_s, *back_s]
        free_s -= round_s
        done, now_s = 0, 0.0
        for steps, waits, fragment, rounds_ago in moments:
            done, now_s = steps, now_s + (steps - done) * step_s
            if waits:
                now_s = max(now_s, back_s[fragment] - rounds_ago * round_s)
                continue
            free_s = back_s[fragment] = max(free_s, now_s) + takes_s
        if now_s + (exchange.sync_every - done) * step_s > round_s + slack_s:
            return False
        if all(new <= old + slack_s for new, old in zip([free_s, *back_s], before, strict=True)):
            return True
    return False


def published_rows() -> list[BandwidthRow]:
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


def rows_of(
    parameters: float, sites: int, step_s: float, exchange: Exchange, bits_of: dict[str, float]
) -> list[BandwidthRow]:
    """Any model, over a ring. `bits_of`: bits per parameter by codec."""
    rows = _data_parallel_rows(parameters, sites, step_s, None)
    for codec, bits in bits_of.items():
        rows += decoupled_rows(parameters * bits * ring_factor(sites), codec, sites, step_s, exchange, None)
    return rows


def _data_parallel_rows(
    parameters: float, sites: int, step_s: float, printed: tuple[float, ...] | None
) -> list[BandwidthRow]:
    made = []
    for index, percent in enumerate(UTILISATIONS):
        gbps = data_parallel_gbps(parameters * GRADIENT_BITS, sites, step_s, percent / 100)
        row = BandwidthRow("data_parallel", "bf16", sites, step_s, 0, 0, 0, float(percent), gbps)
        made.append(replace(row, published_gbps=printed[index] if printed else None))
    return made


def decoupled_rows(
    bits: float, codec: str, sites: int, step_s: float, exchange: Exchange, printed: tuple[float, ...] | None
) -> list[BandwidthRow]:
    made = []
    for index, percent in enumerate(UTILISATIONS):
        gbps = decoupled_gbps(bits, step_s, exchange, percent / 100)
        every, fragments, overlap = exchange.sync_every, exchange.fragments, exchange.overlap
        row = BandwidthRow("decoupled", codec, sites, step_s, every, fragments, overlap, float(percent), gbps)
        made.append(replace(row, published_gbps=printed[index] if printed else None))
    return made
