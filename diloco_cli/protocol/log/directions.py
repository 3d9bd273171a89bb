"""What the log remembers of the directions of deltas: how far each learner's point against the others', merge by merge.

A merge of three or more states for each delta the upper median of its cosines with the others. Those of honest learners
are about -0.1 in the mean even if each has data of its own alphabet, and the lowest that was measured is -0.56; only
one whose data contradict the others' (other targets for the same inputs: -0.64) comes near a sign flip, of -0.7 or
less. What is below AGAINST adds up, and a single cosine of FLIPS or less is enough; merges in which a learner agrees
take little of it back. From OPPOSES on it weighs next to nothing (rules/norms.py), until it has agreed for some rounds.
A delta of FLIPS or less weighs so little already in its own merge. Where half of a merge's deltas or more are such,
nobody can tell whose do, and the merge says nothing. Nobody is refused or held back for a direction.
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco_cli.protocol.log.commits import Commit, Readmit

AGAINST = -0.25
FLIPS, FLIP = -0.7, 2.0  # a cosine, and what it adds
OPPOSES, MOST = 1.0, 4.0
PAID_BACK = 0.125  # by one merge


def logged_cosine(cosine: float) -> float:
    """As the log states it; decisions are made from this figure."""
    return round(cosine, 6)


def opposition_after(known: dict[str, float], commit: Commit) -> dict[str, float]:
    """The sums after one more commit, of learners that have one above 0."""
    if isinstance(commit, Readmit):
        return {name: one for name, one in known.items() if name != commit.learner}
    stated = {item.learner: item.agrees for item in commit.inputs if item.agrees is not None}
    flipping, after = flipping_of(stated), dict(known)
    if flipping is None:
        return known
    for name, agrees in stated.items():
        if agrees >= AGAINST and name not in after:  # nothing to add, nor to pay back
            continue
        change = FLIP if name in flipping else max(-PAID_BACK, AGAINST - agrees)
        after[name] = round(min(MOST, max(0.0, after.get(name, 0.0) + change)), 6)
    return {name: one for name, one in after.items() if one > 0}


def flipping_of(agrees: Mapping[str, float]) -> set[str] | None:
    """Of a merge's learners, by logged cosines, those whose deltas flip; None if the merge says nothing of that."""
    found = {name for name, cosine in agrees.items() if cosine <= FLIPS}
    return found if 2 * len(found) < len(agrees) else None


def opposes(known: dict[str, float], learner: str) -> bool:
    return known.get(learner, 0.0) >= OPPOSES
