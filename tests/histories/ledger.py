"""The account of all data that learners processed: each range has one outcome in each fragment.

    applied     a merge used an offer that holds it (also if a rollback has undone that merge)
    discarded   its learner dropped it, with a reason: an adoption replaced it, a predecessor's offer was ahead
    held        it was in the parameters when its incarnation ended: in an offer whose outcome was not known, or in none

Each learner's witness keeps this account beside the books of the protocol's code: the data that it stepped on, put into
offers and dropped. The log gives the rest. A late offer changes nothing: its data stays held, or is dropped with a
reason. Only data lost with the end of an incarnation may lack both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diloco_cli.protocol.log.records import RunFormat
from tests.histories.replayer import AppliedOffer, Replayer, expect

Range = tuple[int, int]


@dataclass
class Account:
    """The account of one incarnation; ranges are in tokens of its shard. `held`: from where on a fragment's progress is
    in the parameters and in no merge; `unsent`: from where on it is in no offer either. `discarded`: (range, from where
    on it was in no offer, reason)."""

    learner: str
    incarnation: int
    held: list[int]
    unsent: list[int]
    processed: list[Range] = field(default_factory=list)
    offered: dict[int, list[tuple[int, Range]]] = field(default_factory=dict)
    discarded: dict[int, list[tuple[Range, int, str]]] = field(default_factory=dict)
    public: str = ""  # the key that it signs with: two processes may have one number, if a key was revoked

    def stepped(self, start: int, end: int) -> None:
        if self.processed and self.processed[-1][1] == start:
            self.processed[-1] = (self.processed[-1][0], end)
        else:
            self.processed.append((start, end))

    def sent(self, fragment: int, seq: int, start: int, end: int) -> None:
        self.offered.setdefault(fragment, []).append((seq, (start, end)))
        self.unsent[fragment] = max(self.unsent[fragment], end)

    @property
    def tokens(self) -> int:
        """All tokens that the incarnation has processed."""
        return sum(end - start for start, end in self.processed)

    def kept(self, fragment: int, start: int) -> None:
        """An adopted version holds the data before `start`; the parameters keep the data after it."""
        self.held[fragment] = start

    def gave_up(self, fragment: int, reason: str, position: int) -> None:
        """The learner has dropped all progress up to `position` that is in no version."""
        if self.held[fragment] < position:
            given_up = ((self.held[fragment], position), self.unsent[fragment], reason)
            self.discarded.setdefault(fragment, []).append(given_up)
        self.held[fragment] = self.unsent[fragment] = position


def max_lost(run: RunFormat, batch_tokens: int) -> int:
    """The most tokens that can be lost with one incarnation: those of the steps between two adoptions of a fragment, by
    the drift bound and by the largest age of an offer's base; with `rebase` as many beside an offer on its way."""
    sync = run.settings.sync
    offers = 2 if sync.mixing == "rebase" else 1
    return offers * (sync.drift_rounds + sync.staleness_rounds + 2) * sync.every * batch_tokens


def check_outcomes(accounts: Sequence[Account], replayer: Replayer, fragments: int, most: int) -> int:
    """4: raises at the first range with no outcome, or with two, and if more than `most` tokens were lost with an
    incarnation. Returns the tokens lost in this way, of the fragment with the largest number."""
    applied: dict[tuple[str, int, str], list[AppliedOffer]] = {}
    for item in replayer.applied:
        applied.setdefault((item.learner, item.incarnation, item.public), []).append(item)
    lost = [0] * fragments
    for account in accounts:
        mine = applied.pop((account.learner, account.incarnation, account.public), [])
        for fragment in range(fragments):
            here = _check_fragment(account, fragment, [item for item in mine if item.fragment == fragment])
            who = f"{account.learner} {account.incarnation}, fragment {fragment}"
            expect(here <= most, "loss", f"{who}: {here} tokens are lost, more than {most}")
            lost[fragment] += here
    expect(not applied, "4", f"{sorted(applied)} merged what no such process has ever processed")
    return max(lost)


def _check_fragment(account: Account, fragment: int, applied: list[AppliedOffer]) -> int:
    """Returns how many tokens the incarnation held at its end that are in no merge."""
    who = f"{account.learner} {account.incarnation}, fragment {fragment}"
    processed = _tokens(account.processed)
    merged = [at for item in applied for at in range(item.start, item.end)]
    expect(len(set(merged)) == len(merged), "4", f"{who}: some data was applied twice")
    expect(processed.issuperset(merged), "4", f"{who}: {_some(set(merged) - processed)} merged, and never processed")
    discarded = account.discarded.get(fragment, [])
    never_sent = _tokens((max(start, unsent), end) for (start, end), unsent, _ in discarded)
    twice = never_sent & set(merged)
    expect(not twice, "4", f"{who}: {_some(twice)} given up by the learner before any offer held it, and yet applied")
    given_up = _tokens(where for where, _, _ in discarded)
    left = processed - given_up - set(merged)
    silent = {at for at in left if at < account.held[fragment]}
    expect(not silent, "4", f"{who}: {_some(silent)} was processed, is in no merge, and no commit says why")
    return len(left)


def _tokens(ranges: Iterable[Range]) -> set[int]:
    return {at for start, end in ranges for at in range(start, end)}


def _some(tokens: set[int]) -> str:
    return f"{len(tokens)} tokens from {min(tokens, default=0)} on"
