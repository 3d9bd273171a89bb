"""Histories that broke an invariant before a mend, and break none since: see tests/studies/README.md."""

from __future__ import annotations

import pytest

from tests.histories.campaign import lived
from tests.histories.options import drawn_options

MENDED = {
    90001492: "a flood of joins delayed an island's request without end",
    90004354: "offers that a quarantine refused were taken for late ones",
    90007532: "a claim beside those of a revoked key was noticed seconds later",
    90008254: "what lies in a silent learner's place is read again and again (of the check)",
    90011219: "a relay carries the offers of 15 learners one after the other (of the check)",
    92006816: "of two processes under one number, each has what its own key signed (of the check)",
    92017113: "a restarted island asks to join after it was admitted, which nobody answers (of the check)",
    92017901: "a flooder's claims keep replaced incarnations' mailboxes open (of the check)",
    92027270: "of three, one was away for 17 rounds: of the other two neither knows which norm is usual (of the check)",
    93046896: "a region's snapshot bears another syncer's signature than home's (of the check)",
    93057265: "such a snapshot stopped the region's mirror for good",
    93065157: "a poisoner, whose deltas are refused, takes part in half of the merges (of the check)",
    94021958: "one that came back offered never, as the others were merged long before their windows began",
    95016415: "a wish to join that a relay carries after a takeover is one to the syncer before (of the check)",
    50001484: "an offer that arrived after its slot was merged early was taken for one with a long hidden way",
    20007488: "a restart forgot the moments that an offer names, as a floor rose above that offer meanwhile",
    91000031: "who came first, with next to nothing, had honest deltas refused by its word (of two: of the check)",
    92000767: "after 17 s without a syncer a learner looks for commits only now and then (of the check)",
    97071413: "a claim made after a thief's, whose key was revoked unheard, stood behind a gap that syncers stop at",
    97077040: "a process whose key is revoked gave way to one of the same number (of the check)",
    97066442: "a jump that an operator's rollback undid counts as one to get beyond (of the check)",
    97080543: "one late offer left a belief in a hidden delay, and a learner early for a hundred offers",
    100020711: "at the end of 495 syncers of a second each a region lacks 480 commits (of the check)",
    100047353: "what a revoked key had claimed in a region hid the learner's next processes until a new syncer",
    100063636: "an early offer of the only fragment waits, and slots last 0.8 s instead of 0.1 (of the check)",
    97080950: "no faults, of a quarantine, were written as 0, and as 0.0 by who read a snapshot: other lengths",
}


LONG = {100020711}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.long if seed in LONG else ()) for seed in MENDED]
)
def test_what_broke_once_holds(seed: int) -> None:
    assert lived(seed, drawn_options(seed)).violation is None, MENDED[seed]
