"""A tape small enough to read: two learners, two fragments, three merges, one learner that comes back."""

from __future__ import annotations

from diloco_cli.protocol.log.records import TapeEvent
from diloco_cli.protocol.log.tape import Tape, TapeMerge, Track
from tests.unit.protocol.records import BATCH, make_run

RUN = make_run(fragments=2, mixing="rebase")


def steps(count: int) -> TapeEvent:
    return TapeEvent("steps", count=count, batch_tokens=BATCH)


def sent(seq: int) -> TapeEvent:
    """Offer `seq` for slot `seq`."""
    return TapeEvent("sent", seq=seq, fragment=seq % 2, slot=seq)


FIRST = Track(
    "l0", 1, 0, (0, 0),
    events=(steps(2), sent(0), TapeEvent("saved", count=2), steps(2), sent(1), TapeEvent("heard", n=1, local_steps=4),
            TapeEvent("adopted", fragment=0, version=1, since=0), steps(1)),
)  # fmt: skip
AGAIN = Track("l0", 2, 16, (1, 2), inner_step=2, inner_incarnation=1, events=(steps(4), sent(0)))
OTHER = Track("l1", 1, 0, (0, 0), events=(steps(2), sent(0), steps(3), sent(1)))
MERGES = (
    TapeMerge(1, 0, 0, ((("l0", 1, 0), 32.0), (("l1", 1, 0), 32.0)), tokens=8),
    TapeMerge(2, 1, 1, ((("l0", 1, 1), 64.0), (("l1", 1, 1), 50.0)), tokens=26),
    TapeMerge(4, 2, 0, ((("l0", 2, 0), 64.0),), tokens=34),
)
TAPE = Tape(RUN, (FIRST, AGAIN, OTHER), MERGES)
