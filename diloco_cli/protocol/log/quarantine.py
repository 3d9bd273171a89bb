"""Learners whose offers are bad again and again are kept out, in the log, until an operator lets them in.

Every bad offer is refused anyway, so a quarantine protects no parameter. It keeps one that cannot be trusted from being
counted, waited for and read, and tells people so. Each refusal for a reason of HOSTILE is a fault, each offer that a
merge applied takes one fault back; as many faults as two rounds have offers are a quarantine, of the learner and of all
its incarnations to come. So many, because a change that is nobody's fault (momentum wiped, another learning rate) may
make the norm cap refuse each fragment's deltas for a while. Who is readmitted begins anew at 0.
"""

from __future__ import annotations

from diloco_cli.protocol.log.commits import Commit, Quarantine, Readmit

FEWEST_FAULTS = 8
ROUNDS_OF_FAULTS = 2
# What no honest learner causes. A bad signature is somebody else's: a stranger's forgeries must not keep out whom they
# name. Too late, too old, overlapping or superseded are everybody's outcome now and then.
HOSTILE = frozenset({
    "bad_record", "bad_claim", "wrong_base", "missing_payload", "wrong_size", "digest_mismatch", "bad_payload",
    "non_finite", "bad_norms", "norm_cap",
})  # fmt: skip


def faults_after(faults: int, commit: Commit, learner: str) -> int:
    """A learner's count after one more commit, by what it refuses and applies of that learner's. Everybody who counts
    faults, counts them by this."""
    if isinstance(commit, Quarantine | Readmit) and commit.learner == learner:
        return 0
    num_applied = sum(item.learner == learner for item in commit.inputs)
    num_hostile = sum(outcome.learner == learner and outcome.reason in HOSTILE for outcome in commit.outcomes)
    return max(0, faults - num_applied) + num_hostile


def faults_for_quarantine(num_fragments: int) -> int:
    return max(FEWEST_FAULTS, ROUNDS_OF_FAULTS * num_fragments)


def quarantine_reason(faults: int) -> str:
    return f"{faults} offers too many that no honest learner makes"
