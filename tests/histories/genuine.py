"""What the processes of a run have written themselves, by a reader of its own: whatever else lies in the bucket must
not move the log (`Genuine`), and may be looked at only so often (`ForeignReads`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.histories.options import POLL_BOUNDS_S
from tests.histories.processes import MAX_DRIFT
from tests.histories.replayer import LIVENESS, OfferId, Plain, expect, numbered

GENUINE = "genuine"
SEEN_A_LOOK = 40  # of others' objects, by one process, for each learner
SEEN_A_SECOND = 120.0
TIMES, TIMES_A_SECOND = 16, 2 * (1 + MAX_DRIFT) / POLL_BOUNDS_S[0]  # of one object: twice when its place is asked for


@dataclass
class Genuine:
    """Raises ViolationError where a commit rests on anything else. `claims`: each learner's newest incarnation."""

    offers: set[OfferId] = field(default_factory=set)
    claims: Counter[str] = field(default_factory=Counter)
    requests: set[int] = field(default_factory=set)
    joins: set[tuple[str, int]] = field(default_factory=set)  # (name, epoch)

    def created(self, key: str) -> None:
        """The process whose record this is has written it."""
        kind, _, rest = key.partition("/")
        if kind == "offer":
            self.offers.add(numbered(key))
        elif kind == "incarnation":
            learner, incarnation, _ = numbered(key)
            self.claims[learner] = max(self.claims[learner], incarnation)
        elif kind == "request":
            self.requests.add(int(rest[:10]))
        elif kind == "join":
            learner, _, name = rest.partition("/")
            self.joins.add((learner, int(name[:10])))

    def committed(self, commit: Plain) -> None:
        what = f"commit {commit['n']}, a {commit['kind']},"
        for item in (*commit.get("inputs", ()), *commit["outcomes"]):
            offer_id = item["learner"], item["incarnation"], item["seq"]
            expect(offer_id in self.offers, GENUINE, f"{what} tells of offer {offer_id}, which its learner never made")
        asked = commit["request"] is None or commit["request"] in self.requests
        expect(asked, GENUINE, f"{what} answers request {commit['request']}, which no operator made")
        for island in commit.get("islands", ()):
            joins = (island["name"], commit["epoch"]) in self.joins
            expect(joins, GENUINE, f"{what} admits {island['name']}, which has not asked this epoch's syncer")


@dataclass
class ForeignReads:
    """Which objects of forgers and flooders each process has read since the last slot began, and how often.

    How many lie there may not cost a process more than bounded portions: so the number of different ones counts. What
    lies at the place where a record is expected is read whenever that record is asked for, however long its writer is
    silent: so of reads of the same one, how often counts."""

    since_s: float = 0.0
    most: int = 0
    counted: dict[str, Counter[str]] = field(default_factory=dict)

    def read(self, process: str, key: str) -> None:
        self.counted.setdefault(process, Counter())[key] += 1

    def slot_over(self, now_s: float, learners: int) -> None:
        """However many there are, a process looks at a bounded number of them in a slot."""
        took_s = now_s - self.since_s
        most, most_times = learners * SEEN_A_LOOK + SEEN_A_SECOND * took_s, TIMES + TIMES_A_SECOND * took_s
        for name, seen in self.counted.items():
            self.most = max(self.most, len(seen))
            text = f"{name} has read {len(seen)} objects of forgers and flooders in one slot, more than {most:.0f}"
            expect(len(seen) <= most, LIVENESS, text)
            key, times = max(seen.items(), key=lambda item: item[1])
            text = f"{name} has read {key}, which a forger or a flooder wrote, {times} times in {took_s:.1f} s"
            expect(times <= most_times, LIVENESS, text)
        self.counted.clear()
        self.since_s = now_s
