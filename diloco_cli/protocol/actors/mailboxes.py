"""When to look into the mailbox of one incarnation of a learner, and how long anybody does: the syncer at home, and the
relay in a region's bucket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from diloco_cli.protocol.rules.polling import expected_slot_s, next_request_s

MAX_CLAIMS_PER_LOOK = 8  # of one learner's incarnations: a flood must not starve the others
MAX_OFFERS_PER_POLL = 8  # of one learner, for the same reason
MAX_PENDING_ROUNDS = 4  # of offers of one incarnation; an honest learner has at most one a fragment
MAX_OLD_MAILBOXES = 8  # of one learner, beside its newest
RETIRE_S = 120.0


@dataclass
class PolledMailbox:
    """The offers of one incarnation of one learner, asked for in the order of their numbers: `next_seq` is next.

    `slot_s`: the time between them in the learner's own words, which count only beside the others' pace."""

    learner: str
    incarnation: int
    next_seq: int = 0
    since_s: float = 0.0
    found_s: float | None = None
    slot_s: float = 0.0
    next_request_s: float = 0.0
    asked_s: float = -inf

    def asked(self, now_s: float, usual_slot_s: float) -> None:
        """Nothing more is there now: when to ask again."""
        self.asked_s = now_s
        self.next_request_s = next_request_s(self.found_s, now_s, expected_slot_s(self.slot_s, usual_slot_s))


def replaced(old: Iterable[tuple[str, int]], newest: PolledMailbox, now_s: float) -> list[tuple[str, int]]:
    """Which of one learner's `old` mailboxes are given up: nobody looks for ever after the offers of a process that was
    replaced long ago."""
    kept = MAX_OLD_MAILBOXES if now_s - newest.since_s < RETIRE_S else 0
    rising = sorted(old)
    return rising[: max(0, len(rising) - kept)]
