"""What a token is worth under given settings: coarser exchanges buy tokens per second with quality.

These are guesses, made from published comparisons, and only the search uses them: without them it would always take
the coarsest codec and the longest round. A prediction is never scaled by them.
"""

from __future__ import annotations

from math import log2

from diloco_cli.config.settings import SyncSettings

FREE_STEPS = 50  # H up to which longer rounds cost nothing
PER_DOUBLING = 0.05  # H = 1000 against 50: perplexity +2.9 % (arXiv 2311.08105), about 5 % of the tokens a doubling
CODEC_COST = {"fp32": 0.0, "bf16": 0.0, "int8": 0.005, "int4": 0.02}  # int4: loss +0.09 % (arXiv 2604.21428)
NO_WINDOW = 0.25  # K = 1 without a grace window merges single learners (arXiv 2604.21428: accuracy falls)
LEAST = 0.1
MOST_EVERY = 1000  # no longer round has been published


def worth(sync: SyncSettings, local_steps: float, grace_s: float, num_islands: int) -> float:
    """A share in (0, 1] of a token's worth with short rounds in bf16. `local_steps`: between two merges of a fragment,
    more than planned where the syncer cannot keep up."""
    doublings = max(0.0, log2(local_steps / FREE_STEPS))
    cost = PER_DOUBLING * doublings + CODEC_COST[sync.codec] + CODEC_COST[sync.broadcast]
    if num_islands > 1 and sync.quorum < num_islands and grace_s <= 0:
        cost += NO_WINDOW * (num_islands - sync.quorum) / (num_islands - 1)
    return max(LEAST, 1.0 - cost)
