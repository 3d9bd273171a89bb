"""A verifier's books of the held-out loss: whether what the log says of jumps, and of what followed them, fits.

The losses themselves are not evaluated again, nor are the trials that blame a learner: what is checked is that each
commit says what the run's settings give for the losses in the log, and that only a learner is blamed whose deltas were
merged into what has jumped.
"""

from __future__ import annotations

from collections.abc import Callable

from diloco_cli.protocol.log.commits import Commit, Evaluation, Quarantine, Rollback
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.protocol.log.stability import Stability, stability_after
from diloco_cli.protocol.rules.divergence import MAX_ROLLBACKS, jump_of


class LossBooks:
    """Of one log, fed commit by commit. `merged`: the newest commit that merged a delta of each learner."""

    def __init__(self, run: RunFormat, expect: Callable[[bool, str], None]) -> None:
        self.settings, self.expect = run.settings.evaluation, expect
        self.known = Stability()
        self.merged: dict[str, int] = {}

    def check(self, commit: Commit, key: str) -> None:
        match commit:
            case Evaluation():
                jumps = bool(jump_of(commit.loss, self.known.good, self.settings))
                text = "does not say that the loss has jumped" if jumps else "says that the loss has jumped"
                self.expect(commit.jumped == jumps, f"{key}: it {text}")
            case Rollback() if commit.evaluated is not None:
                self._check_rollback(commit, key)
            case Quarantine() if commit.evaluated is not None:
                case = self.known.rejudging
                judged = case is not None and commit.evaluated == case.head.n and commit.learner in case.names
                self.expect(judged, f"{key}: {commit.learner!a} is blamed for commit {commit.evaluated}, unjudged")

    def _check_rollback(self, commit: Rollback, key: str) -> None:
        known = self.known
        jumped = known.jump is not None and known.jump.n == commit.evaluated
        self.expect(jumped, f"{key}: goes back for commit {commit.evaluated}, whose loss has not jumped")
        good = any(at.n == commit.to for at in known.good[-1:])
        self.expect(good, f"{key}: goes back to commit {commit.to}, not to the last one that evaluated well")
        self.expect(
            self.settings.on_divergence == "rollback", f"{key}: goes back, and the run's settings say otherwise"
        )
        self.expect(known.rejudging is None, f"{key}: goes back before the verdict on the jump before")
        self.expect(known.rollbacks < MAX_ROLLBACKS, f"{key}: goes back after {known.rollbacks} times")

    def settle(self, commit: Commit) -> None:
        self.merged |= {item.learner: commit.n for item in commit.inputs}
        self.known = stability_after(self.known, commit, self.merged)
