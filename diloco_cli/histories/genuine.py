"""What the processes of a run have written themselves, by a reader of its own: whatever else lies in the bucket must
not move the log (`Genuine`), and may be looked at only so often (`ForeignReads`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diloco_cli.histories.replayer import LIVENESS, OfferId, Plain, expect

GENUINE = "genuine"
READS_A_LOOK = 40  # of others' objects, by one process, for each learner
READS_A_SECOND = 120.0


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
            learner, incarnation, name = rest.split("/")
            self.offers.add((learner, int(incarnation), int(name[:10])))
        elif kind == "incarnation":
            learner, _, name = rest.partition("/")
            self.claims[learner] = max(self.claims[learner], int(name[:8]))
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
        if commit["kind"] == "revoke" and commit["learner"] is not None:
            newest = self.claims[commit["learner"]]
            text = f"{what} raises the floor of {commit['learner']} to {commit['floor']}, which began {newest} times"
            expect(commit["floor"] <= newest, GENUINE, text)
        asked = commit["request"] is None or commit["request"] in self.requests
        expect(asked, GENUINE, f"{what} answers request {commit['request']}, which no operator made")
        for island in commit.get("islands", ()):
            joins = (island["name"], commit["epoch"]) in self.joins
            expect(joins, GENUINE, f"{what} admits {island['name']}, which has not asked this epoch's syncer")


@dataclass
class ForeignReads:
    """How often each process has read objects of forgers and flooders since the last slot began."""

    since_s: float = 0.0
    most: int = 0
    counted: Counter[str] = field(default_factory=Counter)

    def read(self, process: str) -> None:
        self.counted[process] += 1

    def slot_over(self, now_s: float, learners: int) -> None:
        """However many there are, a process reads a bounded number of them in a slot."""
        most = learners * READS_A_LOOK + READS_A_SECOND * (now_s - self.since_s)
        for name, done in self.counted.items():
            self.most = max(self.most, done)
            text = f"{name} has read {done} objects of forgers and flooders in one slot, more than {most:.0f}"
            expect(done <= most, LIVENESS, text)
        self.counted.clear()
        self.since_s = now_s
