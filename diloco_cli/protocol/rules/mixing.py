"""How a merged fragment is adopted, decided from what the log says, so that every learner decides alike."""

from __future__ import annotations

from diloco_cli.config.settings import AgreementSettings, SyncSettings
from diloco_cli.protocol.log.records import FragmentVersion, Mixing


def mixing_of(sync: SyncSettings, output: FragmentVersion) -> Mixing:
    """By what rule a learner adopts this version. `adaptive` is one of two others; the version itself says which."""
    if sync.mixing != "adaptive":
        return sync.mixing
    return "rebase" if output.rebase else "replace"


def keeps_progress(sync: SyncSettings) -> bool:
    """Whether a version may ever be adopted by `rebase`: then what was sent must be remembered."""
    return sync.mixing in ("rebase", "adaptive")


def as_logged(agreement: float | None) -> float | None:
    """The figure that the log names and the decision is made from."""
    return None if agreement is None else round(agreement, 6)


def rebase_of_next(sync: SyncSettings, before: FragmentVersion | None, agreement: float | None) -> bool:
    """FragmentVersion.rebase of the version that follows `before` (None: there is none)."""
    if sync.mixing != "adaptive":
        return False
    return rebases(before is not None and before.rebase, agreement, sync.agreement)


def rebases(before: bool, agreement: float | None, settings: AgreementSettings) -> bool:
    """Whether progress in flight is kept on adopting a version whose deltas had this mean cosine.

    `before`: of the version it replaces. Two thresholds, so that a run near one does not go to and fro. A merge of one
    learner tells nothing of agreement (None): it stays as it was. Runs begin with `replace`, as the paper does.
    """
    if agreement is None:
        return before
    return agreement >= (settings.replace_below if before else settings.rebase_from)
