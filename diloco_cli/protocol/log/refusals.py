"""Why offers are refused, and after how many bad ones a learner is quarantined.

A bad offer is one that no honest learner makes. It is refused in any case, so a quarantine protects no parameter: it
keeps the syncer from awaiting and reading a learner that cannot be trusted, and `status` shows it. The count begins
anew with each offer that a merge applies, so what happens to an honest learner now and then adds up to nothing.
"""

from __future__ import annotations

from typing import NamedTuple

QUARANTINE_AFTER = 5  # bad offers in a row


class Refusal(NamedTuple):
    """`text`: the reason for people. `bad`: no honest learner causes it."""

    text: str
    bad: bool = False


# A bad signature is not bad: a forged offer must not quarantine the learner that it names. Offers that are late, old,
# overlapping or superseded come from every learner now and then.
REASONS: dict[str, Refusal] = {
    "unknown_learner": Refusal("neither the run's format nor its log names such a learner"),
    "key_revoked": Refusal("its learner's key has been revoked"),
    "old_incarnation": Refusal("a newer incarnation of this learner has been merged"),
    "settled": Refusal("this offer already has an outcome"),
    "late": Refusal("it came when its slot had been merged, or skipped"),
    "too_early": Refusal("it names a slot so far ahead that its base would be too old by then"),
    "bad_claim": Refusal(
        "slot, fragment, tokens, steps or data range contradict each other, or no payload is so large", bad=True
    ),
    "quarantined": Refusal("its learner is quarantined, until an operator readmits it (diloco readmit)"),
    "wrong_base": Refusal("it names other bytes as its base than the log does", bad=True),
    "before_rollback": Refusal("its base lies behind a rollback"),
    "unknown_base": Refusal("the base version is not in the log, or lies further back than the staleness limit"),
    "base_consumed": Refusal("an offer from this base, or from before the merge that used it, was already applied"),
    "data_overlap": Refusal("its data range overlaps what was already applied to this fragment"),
    "superseded": Refusal("a newer offer of the same learner and fragment took its place"),
    "missing_payload": Refusal("its payload is not in the bucket", bad=True),
    "wrong_size": Refusal("its payload has another size than the offer says", bad=True),
    "digest_mismatch": Refusal("its payload has other bytes than the offer says", bad=True),
    "bad_payload": Refusal(
        "its payload's header is not the one that the layout gives: other names, shapes, types", bad=True
    ),
    "non_finite": Refusal("its payload holds values that are not finite", bad=True),
    "bad_norms": Refusal("the norms that it claims are not those of its values", bad=True),
    "no_weight": Refusal("it brings no steps"),
    "bad_signature": Refusal("the offer is damaged: its learner has published the next one"),
    "bad_record": Refusal("the offer itself is not well formed", bad=True),
    "run_over": Refusal("the run ended"),
}


def are_too_many(bad: int) -> bool:
    """Whether a learner with so many bad offers in a row is kept out."""
    return bad >= QUARANTINE_AFTER


def is_bad(reason: str) -> bool:
    return reason in REASONS and REASONS[reason].bad


def bad_in_a_row(before: int, num_applied: int, num_bad: int) -> int:
    """After a commit that applies and refuses so many more offers of a learner."""
    return num_bad if num_applied else before + num_bad
