"""Token weights of a merge (arXiv 2604.21428: quantity x quality)."""

from __future__ import annotations

from typing import Literal

WeightRule = Literal["tokens2/steps", "tokens"]


def token_weight(tokens: int, steps: int, rule: WeightRule) -> float:
    """tokens * (tokens / steps), or tokens alone: >= 0, finite for whatever an offer may claim.

    Equal speed and batch give equal weights; an island that lost half its batch at equal steps weighs a quarter. With
    equal batches the weight goes with the steps, so an island half as fast (H_i = H / 2) weighs half.

    No steps or no tokens weigh nothing (0, never a division by 0). Such an offer is refused (`no_weight`) before it
    counts as present: so there is never a merge whose weights are all 0. A slot for which only such offers come has too
    few for its quorum and waits, with that reason, or is skipped.
    """
    if steps <= 0 or tokens <= 0:
        return 0.0
    return tokens * tokens / steps if rule == "tokens2/steps" else float(tokens)
