"""Token weights of a merge (arXiv 2604.21428: quantity x quality)."""

from __future__ import annotations

from typing import Literal

WeightRule = Literal["tokens2/steps", "tokens"]


def token_weight(tokens: int, steps: int, rule: WeightRule) -> float:
    """tokens * (tokens / steps), or tokens alone. No steps or no tokens weigh nothing.

    Equal speed and batch give equal weights; an island that lost half its batch at equal steps weighs a quarter.
    """
    if steps <= 0 or tokens <= 0:
        return 0.0
    return tokens * tokens / steps if rule == "tokens2/steps" else float(tokens)
