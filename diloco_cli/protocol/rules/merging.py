"""What a delta weighs in a merge (arXiv 2604.21428: quantity x quality)."""

from __future__ import annotations

from diloco_cli.config.settings import SyncSettings


def keeps_progress(sync: SyncSettings) -> bool:
    """Whether versions are adopted by `rebase`: then a learner must remember the parameters that it sent."""
    return sync.mixing == "rebase"


def token_weight(tokens: int, steps: int) -> float:
    """tokens * (tokens / steps): >= 0, finite for whatever an offer may claim.

    Equal speed and batch give equal weights; an island that lost half its batch at equal steps weighs a quarter. With
    equal batches the weight goes with the steps, so an island half as fast (H_i = H / 2) weighs half.

    No steps or no tokens give the weight 0, never a division by 0. Such an offer is refused (`no_weight`) before it
    counts as present, so no merge has only weights of 0. A slot for which only such offers come has no quorum; it
    waits, with that reason, or is skipped.
    """
    if steps <= 0 or tokens <= 0:
        return 0.0
    return tokens * tokens / steps
