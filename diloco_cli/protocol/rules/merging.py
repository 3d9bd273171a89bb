"""What a delta weighs in a merge (arXiv 2604.21428: quantity x quality), and how the merged version is adopted: decided
from what the log says, so that every learner decides alike.
"""

from __future__ import annotations

from typing import Literal

from diloco_cli.config.settings import AgreementSettings, SyncSettings
from diloco_cli.protocol.log.records import FragmentVersion, Mixing


def mixing_of(sync: SyncSettings, output: FragmentVersion) -> Mixing:
    """The rule by which a learner adopts this version. With `adaptive` the version itself says which of two it is."""
    if sync.mixing != "adaptive":
        return sync.mixing
    return "rebase" if output.rebase else "replace"


def keeps_progress(sync: SyncSettings) -> bool:
    """Whether a version may ever be adopted by `rebase`: then a learner must remember the parameters that it sent."""
    return sync.mixing in ("rebase", "adaptive")


def as_logged(agreement: float | None) -> float | None:
    """The agreement as the log states it; the decision is made from this rounded figure."""
    return None if agreement is None else round(agreement, 6)


def rebase_of_next(sync: SyncSettings, before: FragmentVersion | None, agreement: float | None) -> bool:
    """FragmentVersion.rebase of the version that follows `before` (None: there is none)."""
    if sync.mixing != "adaptive":
        return False
    return rebases(before is not None and before.rebase, agreement, sync.agreement)


def rebases(before: bool, agreement: float | None, settings: AgreementSettings) -> bool:
    """Whether progress in flight is kept on adopting a version whose deltas had this mean cosine.

    `before`: the answer for the version that it replaces. Two thresholds keep a run near one of them from switching at
    every merge. A merge of one learner has no agreement (None) and keeps the answer. Runs begin with `replace`.
    """
    if agreement is None:
        return before
    return agreement >= (settings.replace_below if before else settings.rebase_from)


WeightRule = Literal["tokens2/steps", "tokens"]


def token_weight(tokens: int, steps: int, rule: WeightRule) -> float:
    """tokens * (tokens / steps), or tokens alone: >= 0, finite for whatever an offer may claim.

    Equal speed and batch give equal weights; an island that lost half its batch at equal steps weighs a quarter. With
    equal batches the weight goes with the steps, so an island half as fast (H_i = H / 2) weighs half.

    No steps or no tokens give the weight 0, never a division by 0. Such an offer is refused (`no_weight`) before it
    counts as present, so no merge has only weights of 0. A slot for which only such offers come has no quorum; it
    waits, with that reason, or is skipped.
    """
    if steps <= 0 or tokens <= 0:
        return 0.0
    return tokens * tokens / steps if rule == "tokens2/steps" else float(tokens)
