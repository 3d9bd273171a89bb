"""Which key may sign which commit: what a certificate allows, as far as the log says so. Pure.

    A revoked key signs no commit after the one that revoked it.
    An epoch counts under one key: the one that signed its epoch_start signs all its commits.
    An epoch begins after all others, and no commit but an epoch_start begins one.
    Under the operator's own key a command answers operators while no syncer serves. It makes no merge.

A commit that breaks one of these is refused by every reader, at the same number. Processes of this program fold what
they are about to write, and so never write one; what a thief of a key has written in the log's next place stays there
until a person removes it.
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco_cli.protocol.log.commits import Commit, EpochStart, Evaluation, Finish, Merge, Quarantine, Skip
from diloco_cli.protocol.log.wire import RecordError
from diloco_cli.signing import NOBODY, OPERATOR, Signature

OF_SYNCERS = (Merge, Skip, Evaluation, Quarantine, Finish)  # unless an operator asked for it


class AuthorityError(RecordError):
    """A commit is signed by a certified key that may not sign it."""

    code = "authority"

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message, where=where, hint="take its writer's credentials away, then remove that object")


def asked_for(commit: Commit) -> bool:
    """Whether it is the answer to a request that syncers also make by themselves: a quarantine."""
    return isinstance(commit, Quarantine) and commit.request is not None


def contradiction(epoch: int, epoch_key: str, revoked: Mapping[str, int], commit: Commit, by: Signature) -> str | None:
    """Why a commit signed `by` may not come next in a log whose epoch, with its key, is the given one; None if it may.
    Nothing is known of who wrote what in an unsigned run."""
    if by == NOBODY:
        return None
    if by.public in revoked:
        return f"is signed by {by.signer} with a key that commit {revoked[by.public]} revoked"
    if isinstance(commit, EpochStart):
        if commit.epoch <= epoch:
            return f"begins epoch {commit.epoch} after epoch {epoch}"
        return "serves merges under the operator's key" if by.signer == OPERATOR and commit.serves else None
    if commit.epoch != epoch or by.public != epoch_key:
        return f"of epoch {commit.epoch} is signed by {by.signer} with another key than epoch {epoch} began under"
    if by.signer == OPERATOR and isinstance(commit, OF_SYNCERS) and not asked_for(commit):
        return "is signed by the operator, who only answers requests"
    return None
