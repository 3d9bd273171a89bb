"""A verifier's own books: each rule of the log can be broken, and then they say so."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings
from diloco_cli.observe import checker
from diloco_cli.observe.checker import Checker
from diloco_cli.protocol.actors.membership import refusal_of_island
from diloco_cli.protocol.log.records import FragmentVersion, Island, MergedOffer, Outcome
from tests.unit.protocol.records import KINDS, applied, make_run, output

RUN = make_run(2, quorum=1)
P = 3  # parameters of each fragment


class Ledger:
    """Commits entered one after the other, as a replay does; `problems` of the last one."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.checker = Checker(RUN, lambda holds, rule, otherwise: None if holds else self.problems.append(otherwise))
        self.n = -1
        self.enter("epoch_start", outputs=tuple(output(f, 0, -1) for f in range(2)))

    def enter(self, kind: Any, **fields: Any) -> list[str]:
        self.n, self.problems = self.n + 1, []
        commit = KINDS[kind](**{"n": self.n, "epoch": 1, **fields})
        self.checker.check(commit, "c")
        self.checker.settle(commit)
        return self.problems

    def merge(self, item: MergedOffer, **made: Any) -> list[str]:
        slot = self.checker.slot
        outputs = (FragmentVersion(**{**vars(output(slot % 2, self.n + 1, slot)), **made}),)
        return self.enter("merge", slot=slot, inputs=(item,), outputs=outputs, quorum=1, tokens=item.tokens)

    def merges(self, count: int) -> Ledger:
        """Of l0 and both fragments in turn, each on the newest version."""
        for k in range(count):
            base = self.checker.versions[k % 2][-1].version
            assert self.merge(applied("l0", k, base=base, data_start=8 * k, data_end=8 * k + 8)) == []
        return self

    def bad_offers(self, name: str, count: int, seq: int = 100) -> None:
        outcomes = tuple(Outcome(name, 1, seq + k, 0, "non_finite") for k in range(count))
        assert self.enter("refuse", outcomes=outcomes) == []


def rollback(ledger: Ledger, to: int, shares: tuple[tuple[str, int], ...], **changed: Any) -> list[str]:
    then = [ledger.checker.version_at(f, to) for f in range(2)]
    slot = ledger.checker.slot - 1
    outputs = tuple(
        FragmentVersion(**{**vars(o), "version": ledger.n + 1, "slot": slot, **changed}) for o in then if o is not None
    )
    return ledger.enter("rollback", outputs=outputs, to=to, shares=shares)


def test_an_offers_outcome_takes_a_few_bytes_wherever_its_number_lies() -> None:
    ledger, many, strange = Ledger(), 20_000, (1 << 52, -1)
    ledger.bad_offers("l0", 1, 0)
    tracemalloc.start()
    for first in range(1, many, 1000):
        ledger.bad_offers("l0", 1000, first)
    for seq in strange:
        ledger.bad_offers("l0", 1, seq)
    books = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, checker.__file__)])  # not other threads
    tracemalloc.stop()
    assert 1 < sum(trace.size for trace in books.traces) / many < 8
    for seq in (1, many, *strange):
        again = ledger.enter("refuse", outcomes=(Outcome("l0", 1, seq, 0, "non_finite"),))
        assert again == [f"c: offer 1/{seq} of l0 is refused a second time"]


def test_an_honest_log_has_no_problems() -> None:
    ledger = Ledger().merges(4)
    assert rollback(ledger, 2, (("l0", 16 * P),)) == []
    ledger.bad_offers("l0", 8)
    assert ledger.enter("quarantine", learner="l0") == ledger.enter("readmit", learner="l0", request=0) == []
    assert ledger.enter("gc_floor", floor=3, request=2) == []
    assert ledger.checker.token_parameters == 16 * P


def test_a_member_of_an_old_log_is_one_whatever_it_said_of_its_machine() -> None:
    ledger = Ledger()
    ledger.checker.run = replace(RUN, settings=replace(RUN.settings, data=DataSettings(shards=3)))
    old = Island("old", "here", 4, 4, 0.0, 0.0, num_accelerators=0, accelerator="a machine " * 20)
    assert refusal_of_island(old, ledger.checker.run) is not None, "nobody joins like that"
    assert ledger.enter("membership", islands=(old,)) == []
    assert "takes part already" in ledger.enter("membership", islands=(old,))[0]
    assert "a batch of 0 tokens" in ledger.enter("membership", islands=(replace(old, name="new", batch_tokens=0),))[0]


def test_a_request_is_answered_once() -> None:
    ledger = Ledger()
    assert ledger.enter("refuse", request=4) == []
    for request in (4, 2):
        assert f"request {request} is answered a second time" in ledger.enter("refuse", request=request)[0]


def test_nobody_is_quarantined_where_the_quorum_needs_everybody() -> None:
    ledger = Ledger()
    for name, problem in (("l0", []), ("l1", ["c: a quarantine of 'l1' leaves 0 learners, quorum 1"])):
        ledger.bad_offers(name, 8)
        assert ledger.enter("quarantine", learner=name) == problem


@pytest.mark.parametrize(
    ("kind", "learner", "words"),
    [
        ("quarantine", "l1", "after 0 bad offers in a row"),
        ("quarantine", "nobody", "not in the run"),
        ("quarantine", "l0", "a second quarantine"),
        ("readmit", "l1", "a second readmit"),
    ],
)
def test_quarantines_and_readmissions_without_a_cause_are_named(kind: str, learner: str, words: str) -> None:
    ledger = Ledger()
    ledger.bad_offers("l0", 8)
    assert ledger.enter("quarantine", learner="l0") == []
    assert any(words in problem for problem in ledger.enter(kind, learner=learner))


def test_what_comes_from_a_learner_in_quarantine_is_named() -> None:
    ledger = Ledger()
    ledger.bad_offers("l0", 8)
    ledger.enter("quarantine", learner="l0")
    assert "in quarantine" in ledger.merge(applied("l0", 0))[0]
    assert ledger.merge(applied("l1", 0)) == []


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"base": 2, "seq": 9, "data_start": 64, "data_end": 72}, "base 2, which fragment 0 never had"),
        ({"base": 0, "seq": 9, "data_start": 64, "data_end": 72, "learner": "l1"}, "behind the staleness limit"),
    ],
)
def test_bases_that_no_syncer_would_merge_are_named(item: dict[str, Any], words: str) -> None:
    ledger = Ledger().merges(8)
    assert any(words in problem for problem in ledger.merge(applied(**item)))


def test_a_base_within_the_staleness_limit_is_fine_and_so_is_an_old_current_one() -> None:
    ledger = Ledger().merges(8)
    assert ledger.merge(applied("l1", 9, base=3, data_start=64, data_end=72)) == []
    for _ in range(9):  # slots are skipped: fragment 1 does not change, however old it is
        assert ledger.enter("skip", slot=ledger.checker.slot) == []
    assert ledger.checker.slot % 2 == 0
    assert ledger.enter("skip", slot=ledger.checker.slot) == []
    current = ledger.checker.versions[1][-1].version
    assert ledger.merge(applied("l1", 10, base=current, data_start=72, data_end=80)) == []


def test_books_of_a_long_log_stay_small_and_forget_nothing_that_counts() -> None:
    """A floor lets go of what no correct commit can refer to; a rollback to it, and a base or an offer that comes a
    second time, are still judged."""
    ledger = Ledger().merges(400)
    assert ledger.enter("gc_floor", floor=ledger.n - 20, request=0) == []
    books = ledger.checker
    kept = [sum(map(len, books.versions.values())), sum(map(len, books.bases.values())), len(books.shares_after)]
    assert all(10 <= count <= 24 for count in kept), kept
    assert books.duplicates == 0
    ledger.merge(applied("l0", 7, base=books.versions[0][-1].version, data_start=8 * 400, data_end=8 * 401))
    assert books.duplicates == 1, "the offer of number 7, of long ago"
    newest = books.versions[1][-1].version
    assert ledger.merge(applied("l0", 401, base=newest, data_start=8 * 401, data_end=8 * 402)) == []
    ledger.enter("skip", slot=books.slot)
    used_twice = ledger.merge(applied("l0", 402, base=newest, data_start=8 * 402, data_end=8 * 403))
    assert any(f"uses base {newest} a second time" in problem for problem in used_twice)
    floor = books.gc_floor
    assert rollback(ledger, floor, tuple(books.shares_after[floor].items())) == []


def test_a_version_says_for_which_slot_it_was_made() -> None:
    assert "of another slot" in Ledger().merge(applied(), slot=6)[0]
    ledger = Ledger().merges(4)
    assert any("of another slot" in problem for problem in rollback(ledger, 2, (("l0", 16 * P),), slot=0))


@pytest.mark.parametrize("floor", [0, 5, 6])
def test_a_floor_rises_and_lies_behind_its_commit(floor: int) -> None:
    assert f"floor {floor} after 0" in Ledger().merges(4).enter("gc_floor", floor=floor)[0]
