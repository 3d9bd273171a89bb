"""What the log remembers of norms: the same for every reader, bounded, and begun anew only for good reasons."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from diloco_cli.config.settings import SyncSettings
from diloco_cli.protocol.log.commits import EpochStart, Merge, Quarantine, Readmit, Refuse, Skip
from diloco_cli.protocol.log.norms import (
    ALONE,
    FALLS,
    FOLLOWS,
    LEARNERS_KEPT,
    MERGES_KEPT,
    NEW,
    NOTHING,
    ROUNDS_KEPT,
    SETTLED,
    FragmentNorms,
    Norms,
    longest,
    norms_after,
    shortest,
)
from diloco_cli.protocol.log.records import MergedOffer, Outcome
from diloco_cli.protocol.log.snapshots import Snapshot
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, decode, encode
from diloco_cli.protocol.rules.norms import CAP, JudgedDelta, judge
from tests.unit.protocol.records import applied, commit, follow, genesis, merge, output

STEPS = 2


class Judged:
    """A log of one fragment whose deltas are judged by the rule. `round` gives the norm of each learner's delta."""

    def __init__(self, sync: SyncSettings = SyncSettings()) -> None:
        self.norms: Norms = {}
        self.slot, self.sync = 0, sync

    @property
    def memory(self) -> FragmentNorms:
        return self.norms.get(0, NOTHING)

    def round(self, **norms: float) -> set[str]:
        """One slot; the names of those that were refused."""
        deltas = [JudgedDelta(name, STEPS, norm, 1.0, round_steps=STEPS) for name, norm in sorted(norms.items())]
        verdicts = judge(self.memory, deltas, self.sync).verdicts
        inputs, outcomes = [], []
        for delta, verdict in zip(deltas, verdicts, strict=True):
            if verdict.refused:
                outcomes.append(Outcome(delta.learner, 1, self.slot, 0, "norm_cap", delta.norm, STEPS))
            else:
                inputs.append(item(delta.learner, delta.norm, scale=verdict.scale))
        if inputs:
            made = Merge(
                slot=self.slot,
                inputs=tuple(inputs),
                outcomes=tuple(outcomes),
                outputs=(output(0, 1, self.slot),),
            )
            self.norms = norms_after(self.norms, made, 1)
        else:
            self.norms = norms_after(self.norms, Skip(slot=self.slot, outcomes=tuple(outcomes)), 1)
        self.slot += 1
        return {outcome.learner for outcome in outcomes}

    def rounds(self, times: int, **norms: float) -> list[set[str]]:
        return [self.round(**norms) for _ in range(times)]


def item(learner: str, norm: float, **fields: float) -> MergedOffer:
    return replace(applied(learner), norm=norm, steps=STEPS, weight=1.0, **fields)


def usual(*learners: str) -> Judged:
    log = Judged()
    assert log.rounds(NEW, **dict.fromkeys(learners, 1.0)) == [set()] * NEW
    return log


# -- what is remembered ---------------------------------------------------------------------------------------------


def test_a_new_learner_is_followed_closely_and_a_known_one_slowly() -> None:
    log = Judged()
    for norm in (0.01, 1.0, 2.0):
        log.round(a=norm)
        assert log.memory.usual["a"].norm == norm
    log.rounds(NEW, a=2.0)
    log.round(a=10.0)
    assert log.memory.usual["a"].norm == 2.0 * FOLLOWS
    log.round(a=0.1)
    assert log.memory.usual["a"].norm == 2.0 * FOLLOWS * FALLS


def test_short_deltas_after_a_rollback_do_not_lower_what_is_usual() -> None:
    """However few steps they hold."""
    log = usual("a", "b", "c")
    for steps in (1, 1, 2, 1):
        short = tuple(replace(item(name, 0.01), steps=steps) for name in "abc")
        log.norms = norms_after(log.norms, Merge(slot=log.slot, inputs=short, outputs=(output(0, 1, log.slot),)), 1)
        log.slot += 1
    assert log.memory.usual["a"].norm == FALLS**4 and log.memory.usual["a"].steps == STEPS


def test_a_restarted_syncer_and_a_snapshot_remember_the_same() -> None:
    log = usual("a", "b", "c")
    log.round(a=1.0, b=1.0, c=1e4)
    before = log.norms
    state = decode(Snapshot, encode(Snapshot(RunState(norms=before), "digest", "id")), "snapshot").state
    assert state.norms == before == norms_after(before, EpochStart(), 1)
    log.norms = state.norms
    assert log.round(a=1.0, c=1e4) == {"c"}


def test_only_the_commit_of_a_slot_moves_the_memory() -> None:
    refused = (Outcome("c", 1, 0, 0, "norm_cap", 9.0, 2),)
    assert norms_after({}, Refuse(outcomes=refused), 1) == {}
    assert norms_after({}, Skip(slot=0, outcomes=(Outcome("c", 1, 0, 0, "late"),)), 1) == {}
    assert norms_after({}, Skip(slot=0, outcomes=refused), 1)[0].refused["c"].last == 0


def test_the_folded_log_has_it_by_fragment() -> None:
    state = merge(merge(genesis(), applied("l0", norm=3.0)), applied("l0", 1, norm=5.0))
    state = follow(state, "skip", slot=2, outcomes=(Outcome("l1", 1, 0, 0, "norm_cap", 99.0, 4),))
    assert {fragment: one.usual["l0"].norm for fragment, one in state.norms.items()} == {0: 3.0, 1: 5.0}
    assert state.norms[0].refused["l1"].norm == 99.0 / 2 and state.norms[0].merged == (3.0,)
    assert commit(state, "merge", slot=3, inputs=(applied(),)).step == 1.0


def test_the_memory_is_bounded() -> None:
    """512 learners, 24 fragments: a small part of what a record may hold."""
    norms: Norms = {}
    for slot in range(24 * 3):
        inputs = tuple(item(f"learner-{i:03}", 0.0123456789 * (slot + 1)) for i in range(512))
        made = Merge(slot=slot, inputs=inputs, outputs=(output(slot % 24, 1, slot),))
        norms = norms_after(norms, made, 24)
    assert len(norms) == 24 and {len(one.usual) for one in norms.values()} == {LEARNERS_KEPT}
    assert len(msgspec.json.encode(norms)) < MAX_RECORD_BYTES / 32
    log = Judged()
    for slot in range(20):
        log.round(a=1.0 + slot)
    assert len(log.memory.merged) == MERGES_KEPT


def test_who_has_not_been_merged_for_long_is_forgotten() -> None:
    log = usual("a", "b")
    log.rounds(ROUNDS_KEPT, a=1.0)
    assert set(log.memory.usual) == {"a"}


def test_honest_lengths_lie_between_the_root_and_the_proportion_of_steps() -> None:
    assert (longest(1.0, 4, 16), shortest(1.0, 4, 16)) == (4.0, 2.0)
    assert (longest(1.0, 16, 4), shortest(1.0, 16, 4)) == (0.5, 0.25)


# -- attacks --------------------------------------------------------------------------------------------------------


def test_a_patient_ratchet_of_one_in_three_is_bounded() -> None:
    log, norm, most = usual("a", "b", "c"), 1.0, 0.0
    for _ in range(200):
        refused = log.round(a=1.0, b=1.0, c=norm)
        most = max(most, 0.0 if refused else norm)
        norm = norm / 2 if refused else norm * 1.5
        assert refused <= {"c"}
    assert most <= CAP


def test_a_lone_attacker_resets_nothing_however_often_it_is_refused() -> None:
    log = usual("a", "b", "c")
    assert log.rounds(50, a=1.0, b=1.0, c=1e4) == [{"c"}] * 50
    away = ROUNDS_KEPT - 1
    assert log.rounds(away, c=1e4) == [{"c"}] * away, "nor while the others are away"


def test_short_deltas_have_no_honest_one_refused() -> None:
    log = usual("a", "b", "c")
    for _ in range(40):
        assert log.round(a=1.0, b=1.0, c=1e-9) == set()


def test_one_that_comes_first_alone_decides_nothing_for_long() -> None:
    log = Judged()
    log.rounds(SETTLED, c=1e-9)
    assert log.round(a=1.0, b=1.0, c=1e-9) == set(), "three in a slot are compared with each other"


# -- a memory that is out of date -------------------------------------------------------------------------------------


def test_most_learners_in_agreement_over_two_rounds_begin_it_anew() -> None:
    log = usual("a", "b", "c")
    assert log.round(a=100.0, b=110.0, c=1.0) == {"a", "b"}
    assert log.round(a=100.0, b=110.0, c=1.0) == {"a", "b"}
    assert log.round(a=100.0, b=110.0, c=1.0) == set()
    assert log.round(a=100.0, b=110.0, c=1000.0) == {"c"}


def test_a_third_that_is_refused_for_another_norm_does_not_hinder_them() -> None:
    log = usual("a", "b", "c")
    log.rounds(2, a=100.0, b=110.0, c=1e9)
    assert log.round(a=100.0, b=110.0, c=1e9) == {"c"}


def test_two_that_do_not_agree_change_nothing() -> None:
    log = usual("a", "b")
    assert log.rounds(9, a=100.0, b=1e4) == [{"a", "b"}] * 9


def test_two_of_two_that_agree_do_and_one_of_two_does_not() -> None:
    log = usual("a", "b")
    assert log.rounds(3, a=100.0, b=100.0)[-1] == set()
    other = usual("a", "b")
    assert other.rounds(20, a=100.0, b=1.0) == [{"a"}] * 20


def test_the_only_learner_of_a_run_does_after_more_rounds() -> None:
    log = usual("a")
    assert log.rounds(ALONE + 1, a=100.0) == [{"a"}] * ALONE + [set()]


def test_who_is_readmitted_may_bring_other_norms_and_nobody_else_may() -> None:
    log = usual("a", "b")
    assert log.round(a=1.0, b=100.0) == {"b"}
    log.norms = norms_after(log.norms, Readmit(learner="b"), 1)
    assert log.round(a=100.0, b=100.0) == {"a"} and len(log.memory.merged) == MERGES_KEPT
    assert log.round(a=1.0, b=100.0) == set() and log.memory.trusted == (), "it is known again"
    assert log.round(a=1.0, b=CAP * 101.0) == {"b"}


def test_who_is_readmitted_is_judged_by_its_company_and_another_quarantine_ends_the_trust() -> None:
    log = usual("a", "b", "c")
    log.norms = norms_after(log.norms, Readmit(learner="b"), 1)
    assert log.round(a=1.0, b=100.0, c=1.0) == {"b"}
    log.norms = norms_after(log.norms, Quarantine(learner="b"), 1)
    assert log.round(b=100.0) == {"b"}


def test_a_merge_in_between_ends_a_learners_refusals() -> None:
    log = usual("a", "b", "c")
    log.round(a=100.0, b=100.0, c=1.0)
    log.round(a=1.0, b=100.0, c=1.0)
    assert log.round(a=100.0, b=100.0, c=1.0) == {"a", "b"}
    assert log.round(a=1.0, b=1.0, c=1.0) == set() and not log.memory.refused
