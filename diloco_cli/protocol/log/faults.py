"""Offers that no honest learner makes, counted.

Quarantine: a learner with many bad offers is kept out by a commit until an operator readmits it. Every bad offer is
refused in any case, so a quarantine protects no parameter. It keeps the syncer from counting, awaiting and reading a
learner that cannot be trusted, and `status` shows it. Each refusal for a reason in HOSTILE is one fault, and each offer
that a merge applied takes PAID_BACK of one back: good offers between bad ones clear nobody, and what happens to an
honest learner now and then adds up to nothing. As many faults as three rounds have offers give a quarantine of the
learner and of all its later incarnations. The number is so high because harmless changes (momentum wiped, another
learning rate) may have each fragment's deltas refused for their norm for two rounds. A readmitted learner begins with
0 faults.
"""

from __future__ import annotations

from diloco_cli.protocol.log import commits

FEWEST_FAULTS = 8
ROUNDS_OF_FAULTS = 3  # more than the norms need to begin anew (norms.py)
PAID_BACK = 1 / 16  # of a fault, by each merged offer; exact in binary
# Reasons that no honest learner causes. A bad signature is not one: a forged offer must not quarantine the learner that
# it names. Offers that are late, old, overlapping or superseded come from every learner now and then.
HOSTILE = frozenset({
    "bad_record", "bad_claim", "wrong_base", "missing_payload", "wrong_size", "digest_mismatch", "bad_payload",
    "non_finite", "bad_norms", "norm_cap",
})  # fmt: skip


def faults_after(faults: float, commit: commits.Commit, learner: str) -> float:
    """A learner's faults after one more commit, from its offers that the commit refuses and applies. All code that
    counts faults uses this function."""
    if isinstance(commit, commits.Quarantine | commits.Readmit) and commit.learner == learner:
        return 0.0
    num_applied = sum(item.learner == learner for item in commit.inputs)
    num_hostile = sum(outcome.learner == learner and outcome.reason in HOSTILE for outcome in commit.outcomes)
    return faults_with(faults, num_applied, num_hostile)


def faults_with(before: float, num_applied: int, num_hostile: int) -> float:
    """After so many more offers of each kind."""
    return max(0.0, before - num_applied * PAID_BACK) + num_hostile


def faults_for_quarantine(num_fragments: int) -> int:
    return max(FEWEST_FAULTS, ROUNDS_OF_FAULTS * num_fragments)


def quarantine_reason(faults: float) -> str:
    return f"{faults:.0f} offers too many that no honest learner makes"
