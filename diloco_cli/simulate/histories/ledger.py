"""What became of all data that learners processed: each range has one fate in each fragment.

    applied     a merge used an offer that holds it (a rollback may have gone behind that merge: it is applied still)
    refused     the log refused every offer that holds it, with a reason
    discarded   its learner gave it up, with a reason: an adoption took its place, a predecessor's offer was ahead
    lost        with its incarnation: it ended before the log said what becomes of an offer, or before there was one

Learners keep this account of their own, beside the books of the protocol's code: what they stepped on, what they put
into offers, what they gave up. The log says the rest. Only what an incarnation's end took may lack a word of either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from diloco_cli.simulate.histories.replayer import Applied, Replayer, expect

Range = tuple[int, int]


@dataclass
class Account:
    """Of one incarnation. `processed`, in tokens of its shard; `offered`, (seq, range), and `discarded`, (range,
    reason), of each fragment; `unsent`: from where on a fragment's progress is in no offer yet."""

    learner: str
    incarnation: int
    batch_tokens: int
    unsent: list[int]
    processed: list[Range] = field(default_factory=list)
    offered: dict[int, list[tuple[int, Range]]] = field(default_factory=dict)
    discarded: dict[int, list[tuple[Range, str]]] = field(default_factory=dict)

    def stepped(self, position: int) -> None:
        """On the batch that begins at `position`."""
        end = position + self.batch_tokens
        if self.processed and self.processed[-1][1] == position:
            self.processed[-1] = (self.processed[-1][0], end)
        else:
            self.processed.append((position, end))

    def sent(self, fragment: int, seq: int, start: int, end: int) -> None:
        self.offered.setdefault(fragment, []).append((seq, (start, end)))
        self.unsent[fragment] = end

    def gave_up(self, fragment: int, position: int, reason: str, goes_on_at: int | None = None) -> None:
        """All progress up to `position` that is in no offer."""
        if self.unsent[fragment] < position:
            self.discarded.setdefault(fragment, []).append(((self.unsent[fragment], position), reason))
        self.unsent[fragment] = position if goes_on_at is None else goes_on_at

    def batches(self) -> Iterator[int]:
        for start, end in self.processed:
            yield from range(start, end, self.batch_tokens)


def check_fates(accounts: Iterable[Account], replayer: Replayer, fragments: int) -> None:
    """4: raises at the first range with no fate, or with two."""
    applied: dict[tuple[str, int], list[Applied]] = {}
    for item in replayer.applied:
        applied.setdefault((item.learner, item.incarnation), []).append(item)
    for account in accounts:
        mine = applied.pop((account.learner, account.incarnation), [])
        for fragment in range(fragments):
            _check_fragment(account, fragment, [item for item in mine if item.fragment == fragment])
    expect(not applied, "4", f"{sorted(applied)} merged what no such process has ever processed")


def _check_fragment(account: Account, fragment: int, applied: list[Applied]) -> None:
    who = f"{account.learner} {account.incarnation}, fragment {fragment}"
    batch, batches = account.batch_tokens, set(account.batches())
    merged = [at for item in applied for at in range(item.start, item.end, batch)]
    expect(len(set(merged)) == len(merged), "4", f"{who}: some data was applied twice")
    expect(batches.issuperset(merged), "4", f"{who}: {sorted(set(merged) - batches)} merged, and never processed")
    given_up = {at for (start, end), _ in account.discarded.get(fragment, []) for at in range(start, end, batch)}
    twice = given_up & set(merged)
    expect(not twice, "4", f"{who}: {sorted(twice)} given up by the learner, and yet applied")
    offered = {at for _, (start, end) in account.offered.get(fragment, []) for at in range(start, end, batch)}
    left = {at for at in batches - given_up - offered if at < account.unsent[fragment]}
    expect(not left, "4", f"{who}: {sorted(left)} was processed, is in no offer, and nobody says why")
